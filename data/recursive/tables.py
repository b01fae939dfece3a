"""Tables of puzzles: columns of questions, and perhaps of answers and ratings, in text."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from utils.errors import ConfigError

# what published tables call their columns
QUESTIONS = ("question", "puzzle", "puzzles", "quiz", "quizzes", "board", "maze")
ANSWERS = ("answer", "answers", "solution", "solutions")
RATING = "rating"
SEPARATORS = ",;\t"

Row = tuple[int, Any, Any, Any]  # line number, question, answer and rating; empty where none is


class Table(NamedTuple):
    """How a table is written, by its first line."""

    separator: str
    fields: int
    header: bool
    question: int  # the indices of the columns
    answer: int | None
    rating: int | None

    def rows(self, where: str, lines: Iterable[str]) -> Iterator[Row]:
        """All rows with their line numbers, below the header; blank lines are none."""
        reader = csv.reader(lines, delimiter=self.separator)
        header = self.header
        try:
            for row in reader:
                if not any(field.strip() for field in row):
                    continue
                if len(row) != self.fields:
                    raise ConfigError(
                        f"{where}: line {reader.line_num} has {len(row)} fields, not {self.fields};"
                        " correct or remove it"
                    )
                if header:
                    header = False
                    continue
                places = (self.question, self.answer, self.rating)
                question, answer, rating = ("" if at is None else row[at] for at in places)
                yield reader.line_num, question, answer, rating
        except (csv.Error, OSError) as error:
            raise ConfigError(
                f"{where}: line {reader.line_num} cannot be read ({error}); correct or remove it"
            ) from None


def table_of(first: str, fits: Callable[[str], object]) -> Table | None:
    """The table that begins with this line, if it names a column of questions or holds one that
    fits.
    """
    separator = max(SEPARATORS, key=first.count)
    try:
        fields = next(csv.reader([first], delimiter=separator), [])
    except csv.Error:
        return None
    names = [field.strip().lower() for field in fields]
    known = {name: index for index, name in reversed([*enumerate(names)])}

    def place_of(choices: Iterable[str]) -> int | None:
        return next((known[name] for name in choices if name in known), None)

    question = place_of(QUESTIONS)
    if question is not None:
        columns = question, place_of(ANSWERS), place_of([RATING])
        return Table(separator, len(fields), True, *columns)
    fitting = [index for index, field in enumerate(fields) if fits(field)]
    if not fitting:
        return None
    beside = fitting[1] if len(fitting) > 1 else None
    return Table(separator, len(fields), False, fitting[0], beside, None)
