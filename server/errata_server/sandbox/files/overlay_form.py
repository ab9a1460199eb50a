"""How overlayfs marks deleted files and opaque directories on disk, in root mode and in rootless mode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlayForm:
    """The on-disk form of an upper layer.

    Args:
        prefix: Prefix of the names of overlayfs' own extended attributes.
        owner: Uid and gid that digests use for every entry; None for those on disk.
        options: Further mount options of the mode.
    """

    prefix: str
    owner: int | None
    options: tuple[str, ...] = ()

    @property
    def opaque(self) -> str:
        """Name of the attribute of an opaque directory, which hides the same directory of lower layers."""
        return f"{self.prefix}opaque"

    def is_private(self, name: str) -> bool:
        """Return whether an extended attribute is overlayfs' own rather than the agent's.

        Overlayfs escapes attributes of the agent that have its prefix by inserting ``overlay.``.
        """
        return name.startswith(self.prefix) and not name.startswith(f"{self.prefix}overlay.")


ROOT_FORM = OverlayForm("trusted.overlay.", None)


def rootless_form(owner: int) -> OverlayForm:
    """Return the form of rootless mode, where one user owns all files and digests use ``owner``, the agent's uid."""
    return OverlayForm("user.overlay.", owner, ("userxattr",))
