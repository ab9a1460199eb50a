"""The on-disk marks of overlayfs for deleted files and opaque directories, for root and for rootless mode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlayForm:
    """Attributes of a mode.

    Args:
        prefix: Names of the overlay's own extended attributes start with it.
        owner: Uid and gid that every entry counts as in digests; None for those it has on disk.
        options: Mount options besides those of every mode.
    """

    prefix: str
    owner: int | None
    options: tuple[str, ...] = ()

    @property
    def opaque(self) -> str:
        """Name of the attribute of a directory that hides what lies below it."""
        return f"{self.prefix}opaque"

    def is_private(self, name: str) -> bool:
        """Tell whether an extended attribute belongs to the overlay, not to the agent.

        The agent's own attributes of that prefix are escaped by a second one.
        """
        return name.startswith(self.prefix) and not name.startswith(f"{self.prefix}overlay.")


ROOT_FORM = OverlayForm("trusted.overlay.", None)


def rootless_form(owner: int) -> OverlayForm:
    """Return the form where an ordinary user mounts, and owns every file: each counts as the agent's, ``owner``."""
    return OverlayForm("user.overlay.", owner, ("userxattr",))
