"""Groups of options in the help of commands."""

from __future__ import annotations


class FoldedPanel(str):
    """Title of a group that most readers do not need: the help of every command but ``home`` only names its options.

    Attributes:
        see: where the options are described, as the end of a sentence.
    """

    see: str
    home: str

    def __new__(cls, title: str, see: str, home: str = "") -> FoldedPanel:
        made = super().__new__(cls, title)
        made.see, made.home = see, home
        return made


OF_UP = "as for `provision up`"
ADVANCED = FoldedPanel("Advanced", OF_UP, home="up")
