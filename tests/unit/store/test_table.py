"""The sample table as its users see it: put, extend, read, drop."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import numpy as np
import pytest

from dora_rl.store.samples import Samples
from dora_rl.store.table import Row, Table, TableClosed, TableCorrupt, TableError
from dora_rl.types import RequestId, Segment

# A file of the release before the table lost its consumers: groups 4 (two samples, one of them
# generated twice) and 5 (dropped), with rewards, of version 3.
OLD_FILE = (
    "c-qZWJ#5oJ6plrpg{5pDAyo93DqSm|e-?|CiArTasKT*=8(&gW$7lJ@N=5L30Ev;Q6VL&{$Ur5=4wV>~SYgZtVqsxn;n{WKRM?"
    "G>I@HqneDB`9_rCAmXOGA3vUE2BwoESsjYi|$&fe{G{qwg?{2qeG!2%&&$$&tIha%~-Sb#NzfVpwVVz6wGe2ax`-xKH)vw<6X;G_"
    "gXwk_L!=&^0ER9q(gwioj#VqU)P#XN~Hl<lM=%=P}R=Dd0G^7%oTH%ep{kq<I2TO|h3iApql8yc}4(scvDh<&tx8@>U=)*Xk~5b$"
    "0U^Nrlxoi+>6?z>_O?T->Vv3LE@7n^8&Ab5zAkUWBHL$F?-g;GqmvTE>5wkHu~c|;m2pxsH&B8+o5<{J64KOTyre8qWT>GH$97ci"
    "<tOLMdo(IQ@b23oBetyY6pJ2|xU5bZp|I6s9{QPyx8?C7J#;q^1ON|1P*h29aIh^T0qaa?spGqYro8&6dM!}KuO7Yz5bdvUJw`@^"
    "7?KaH40w;+ec4E|^}f3$`_dSd*UMYkvgcS<X38~%Ft=e_xZ^<!vLD`=xDY87iOJneR53#@DCQE+$#V?SPKy=^|bbM;c0C(|bs(ge"
    "$#xZV7?)~t0i(ob0buja1!^PMieQfh8QpXm2gcXWOu#5Sh%XPj#Nk^j}t_}5g5^<Vjp`*8oq{ng|8P_LA)IinBJqp0OCBK+w$"
)


def row(group: int, sample: int = 0, version: int = 0, **columns: object) -> Row:
    return Row(RequestId(group, sample), version, columns or {"token_ids": np.array([1, 2])})


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "table.log")


def test_rows_are_read_by_group_and_sample(table: Table) -> None:
    table.put([row(7, 1, 3, token_ids=np.array([4, 5])), row(7, 0, 3), row(8)])
    assert [found.request.sample for found in table.read(7)] == [0, 1]
    found = table.row(RequestId(7, 1))
    assert found is not None
    assert (found.request, found.version) == (RequestId(7, 1), 3)
    assert found.columns["token_ids"].tolist() == [4, 5]
    assert table.row(RequestId(7, 2)) is None and table.read(9) == []
    assert table.groups() == [7, 8]


def test_columns_come_later_and_once(table: Table) -> None:
    table.put([row(7)])
    table.extend(RequestId(7, 0), {"reward": 0.5})
    assert table.read(7)[0].columns["reward"] == 0.5
    with pytest.raises(TableError, match=r"already has \['reward'\]"):
        table.extend(RequestId(7, 0), {"reward": 1.0, "parts": {}})
    with pytest.raises(TableError, match="no row of"):
        table.extend(RequestId(7, 1), {"parts": {}})
    assert table.read(7)[0].columns.keys() == {"token_ids", "reward"}


def test_a_sample_that_is_put_again_takes_its_own_place(table: Table) -> None:
    table.put([row(7), row(7, 1)])
    table.extend(RequestId(7, 0), {"reward": 0.5})
    table.put([row(7, token_ids=np.array([9]))])
    first, second = table.read(7)
    assert first.columns["token_ids"].tolist() == [9] and "reward" not in first.columns
    assert second.columns["token_ids"].tolist() == [1, 2]


def test_a_dropped_group_is_gone_and_may_be_dropped_twice(table: Table) -> None:
    table.put([row(7), row(8)])
    table.drop(7)
    table.drop(7)
    assert table.groups() == [8]


def test_values_are_copied_and_read_only(table: Table) -> None:
    mine = np.arange(3)
    table.put([row(0, a=mine)])
    mine[0] = 99
    (found,) = table.read(0)
    assert found.columns["a"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        found.columns["a"][0] = 5
    with pytest.raises(TypeError, match="object is not JSON"):
        table.put([row(1, x=object())])
    assert table.groups() == [0]


def test_a_closed_table_takes_nothing_more(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    table.put([row(0)])
    table.close()
    table.close()
    with pytest.raises(TableClosed):
        table.put([row(1)])
    with pytest.raises(TableClosed):
        table.extend(RequestId(0, 0), {"reward": 1.0})
    with pytest.raises(TableClosed):
        table.drop(0)


def test_a_file_of_the_last_release_is_read(tmp_path: Path) -> None:
    (tmp_path / "table.log").write_bytes(zlib.decompress(base64.b85decode(OLD_FILE)))
    samples = Samples(tmp_path / "table.log")
    assert samples.groups() == [4]
    assert samples.num_tokens(4) == 4
    first, second = samples.trajectories(4)
    assert (first.token_ids.tolist(), first.reward, first.parts) == ([5, 6], 0.5, {"exact": 0.5})
    assert (second.reward, second.parts, second.text) == (0.25, {}, "t41")
    assert second.segments == (Segment(0, 3),) and second.version == 3
    samples.drop(4)
    samples.close()
    assert Samples(tmp_path / "table.log").groups() == []


def test_what_no_run_writes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"something else entirely")
    with pytest.raises(TableCorrupt, match="not a table"):
        Table(tmp_path / "x")
