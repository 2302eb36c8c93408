"""How an error looks that nobody has described yet. The strong marks stand only where something went wrong; the weak ones also
stand in healthy logs and count only when the log says elsewhere that the run failed."""

from __future__ import annotations

from provision.diagnosis.signatures import compiled

STRONG = ("exception", "crash", "tool", "apt", "loader")
MARKERS = {
    "exception": compiled(r"^(?:E\s{2,})?(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Unavailable)\b(?::|$)"),
    "crash": compiled(r"segmentation fault|fatal python error|exited on signal \d|core dumped|\*\*\* Process received signal|kernel panic"),
    "tool": compiled(r"^CMake Error|: fatal error: |: error: |^fatal: |^error: |^ERROR: |command not found|undefined reference to"),
    "apt": compiled(r"^E: (?:Unable to|Could not|Failed to|Package '?[a-z]|Problem|Version|Malformed|Broken|Repository|Release file)"),
    "loader": compiled(r"error while loading shared libraries|undefined symbol: |cannot open shared object file"),
    "traceback": compiled(r"Traceback \(most recent call last\)"),
    "weak": compiled(r"\berror\b|\bfailed\b|\bfailure\b|\bfatal\b|\baborted\b"),
}
