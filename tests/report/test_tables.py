from dataclasses import dataclass

from rich.console import Console

from locater.report.tables import cells, markdown_table, plain_markdown, terminal_table


@dataclass
class Head:
    name: str
    rho: float | None


ROWS = [Head("a|b", 0.5), Head("[red]*c*", None)]
COLUMNS = {"head": "name", "ρ": "rho:.2f", "twice": lambda row: row.rho and 2 * row.rho}


def test_cells_come_from_entries_attributes_and_functions() -> None:
    assert cells(ROWS, COLUMNS) == [["a|b", "0.50", "1.0"], ["[red]*c*", "-", "-"]]
    assert cells([{"name": "x", "rho": 1.0}], {"ρ": "rho:.1f"}) == [["1.0"]]


def test_a_cell_never_breaks_its_table() -> None:
    assert markdown_table(ROWS, COLUMNS).splitlines()[2] == "| a\\|b | 0.50 | 1.0 |"
    plain = markdown_table([["*c*\nd", "x"]], ["a", "b"], is_plain=True)
    assert plain.splitlines() == ["| a | b |", "|---|---|", "| \\*c\\* d | x |"]
    assert plain_markdown("<b>|</b>") == "\\<b\\>\\|\\</b\\>"


def test_the_terminal_shows_the_same_cells_as_they_are() -> None:
    console = Console(width=60)
    with console.capture() as captured:
        console.print(terminal_table(ROWS, COLUMNS, title="heads", left=("head",), is_compact=True))
    lines = captured.get().splitlines()
    assert lines[0].strip() == "heads"
    assert [line.split() for line in lines if "0.50" in line or "red" in line] == [
        ["a|b", "0.50", "1.0"],
        ["[red]*c*", "-", "-"],  # no markup of a reader's words
    ]
