"""Files as they come: what is damaged, doubled or unprintable in them is said in one line."""

import pyarrow
import pyarrow.parquet
import pytest
from tables import CORE, published_rows

from fit.losses import read_losses
from looped.errors import UserError


def test_what_others_wrote_is_said_in_one_printable_line(table):
    rows = [
        row | {"arm": "two\nlines\u2028", "status": "failed", "reason": "\x1b[2J a\nb"}
        for row in published_rows()
    ]
    with pytest.raises(UserError, match=r"row 1 .*: failed: \[2J a b; ") as error:
        read_losses(table(rows))
    assert str(error.value).isprintable()
    with pytest.raises(UserError, match="column 'loss' is missing; add it: the table has arm, two lines, "):
        read_losses(table(rows, columns=["arm", "two\nlines", *CORE[:-1]]))
    rows = [row | {"arm": "two\nlines\u2028"} for row in published_rows()]
    assert read_losses(table(rows)).arms == ("two lines",)


@pytest.mark.parametrize("at", [6, 40, -12, -5])
def test_a_damaged_parquet_file_is_refused(tmp_path, at):
    pyarrow.parquet.write_table(pyarrow.table({name: [1.0] for name in CORE}), tmp_path / "losses.parquet")
    content = bytearray((tmp_path / "losses.parquet").read_bytes())
    content[at:] = bytes(len(content[at:-4])) + b"PAR1" if at > 0 else b"\xff" * 8 + b"PAR1"
    (tmp_path / "losses.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"begins like Parquet but cannot be read as it .*; write it again"):
        read_losses(tmp_path / "losses.parquet")


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path):
    columns = [pyarrow.array([1.0])] * 6
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays(columns, [*CORE, "loss"]), tmp_path / "losses.parquet"
    )
    with pytest.raises(UserError, match="column 'loss' appears twice"):
        read_losses(tmp_path / "losses.parquet")
