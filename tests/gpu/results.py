"""Results of `make gpu`: kept as JSON after every figure, shown as Markdown beside it."""

from __future__ import annotations

import json
from pathlib import Path

from utils.files import write_whole


class Results:
    """Sections of entries by name. A rerun finds what is there and does what is missing."""

    def __init__(self, file: Path) -> None:
        """`file` is the Markdown; the JSON has its name."""
        self.file, self._state = file, file.with_suffix(".json")
        self._sections: dict[str, dict] = (
            json.loads(self._state.read_text()) if self._state.exists() else {}
        )

    def begin(self, section: str, head: str, afresh: bool = False) -> None:
        """Writes the text above a section's entries: prose, the first lines of a table. `afresh`
        drops the entries so far.
        """
        if afresh or section not in self._sections:
            self._sections[section] = {"entries": {}, "good": []}
        self._sections[section]["head"] = head
        self._write()

    def add(self, section: str, name: str, text: str, good: bool = True) -> None:
        """An entry, in place of one of that name; one that is not good is made again by a rerun."""
        content = self._sections[section]
        content["entries"][name] = text
        content["good"] = [
            *(other for other in content["good"] if other != name),
            *([name] if good else []),
        ]
        self._write()

    def drop(self, section: str, name: str) -> None:
        """Forget an entry, if it is there."""
        self._sections.get(section, {"entries": {}})["entries"].pop(name, None)
        self._write()

    def done(self, section: str) -> list[str]:
        """The good entries of a section."""
        return self._sections.get(section, {}).get("good", [])

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        parts = [
            "\n".join([f"## {name}", "", content["head"], *content["entries"].values(), ""])
            for name, content in self._sections.items()
        ]
        write_whole(self.file, "\n".join(parts))
        write_whole(self._state, json.dumps(self._sections, indent=1))
