"""Which mode runs where, and the switches that turn a mode off."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_protocol.errors import SandboxUnavailable
from errata_server.sandbox.host.privileges import check_privileges, mode_of, why_refused

CLONE, APPARMOR, COUNT = (
    "sys/kernel/unprivileged_userns_clone",
    "sys/kernel/apparmor_restrict_unprivileged_userns",
    "sys/user/max_user_namespaces",
)


def machine(place: Path, *, capabilities: int = 0, **switches: int) -> Path:
    """Return a /proc that says so."""
    for name, value in {"clone": CLONE, "apparmor": APPARMOR, "count": COUNT}.items():
        (place / value).parent.mkdir(parents=True, exist_ok=True)
        if name in switches:
            (place / value).write_text(f"{switches[name]}\n")
    (place / "self").mkdir()
    (place / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    return place


def test_root_and_users_get_a_mode_each() -> None:
    assert (mode_of(0), mode_of(1000)) == ("root", "rootless")


def test_root_needs_the_capability_and_is_never_rootless(tmp_path: Path) -> None:
    check_privileges(0, proc=machine(tmp_path / "whole", capabilities=1 << 21))
    with pytest.raises(SandboxUnavailable, match=r"lacks CAP_SYS_ADMIN.*or as an ordinary user"):
        check_privileges(0, proc=machine(tmp_path / "container", capabilities=1 << 20))


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"clone": 0, "count": 100}, "`sysctl -w kernel.unprivileged_userns_clone=1`"),
        ({"clone": 1, "count": 0}, "`sysctl -w user.max_user_namespaces=10000`"),
    ],
)
def test_a_switch_that_is_off_is_named_with_the_way_to_turn_it_on(
    tmp_path: Path, switches: dict[str, int], says: str
) -> None:
    with pytest.raises(SandboxUnavailable) as caught:
        check_privileges(1000, proc=machine(tmp_path, **switches))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_user_of_a_kernel_without_switches_is_let_in(tmp_path: Path) -> None:
    check_privileges(1000, proc=machine(tmp_path))


def test_a_refusal_that_no_switch_explains_up_front_is_explained_afterwards(tmp_path: Path) -> None:
    # An AppArmor profile may allow what the switch forbids, so it is named only once something was refused.
    restricted = machine(tmp_path / "ubuntu", clone=1, count=100, apparmor=1)
    check_privileges(1000, proc=restricted)
    assert "apparmor_restrict_unprivileged_userns=0" in why_refused(restricted)
    assert "--security-opt" in why_refused(machine(tmp_path / "container", clone=1, count=100, apparmor=0))
