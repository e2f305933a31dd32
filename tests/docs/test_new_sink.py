"""A metric sink is one file: the one of the page, named in the configuration and nowhere else."""

from __future__ import annotations

from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.sinks import RunFacts, Sinks, check_sinks
from tests.docs.document_blocks import blocks_of
from tests.kit.places import ROOT


def test_the_sink_of_the_page_gets_every_line(tmp_path: Path) -> None:
    page = blocks_of(ROOT / "docs" / "extending.md")
    (block,) = [block for block in page if block.saved_as == "csv_sink.py"]
    (tmp_path / block.saved_as).write_text(block.text)
    name = f"{tmp_path / block.saved_as}:CsvSink"
    given = {"model": {"path": "m"}, "data": {"train": "d"}, "logging": {"sinks": [name]}}
    config = RunConfig.model_validate(given)
    check_sinks(config.logging.sinks, {})
    told: list[str] = []
    for first_step in (0, 2):  # the run is resumed in between
        facts = RunFacts(tmp_path, config.model_dump(mode="json"), first_step)
        sinks = Sinks(config.logging.sinks, facts, told.append)
        for step in (first_step, first_step + 1):
            sinks.write({"step": step, "reward/mean": step / 4})
        sinks.write({"version": first_step, "eval/sampled": 0.5})
        sinks.close(20.0)
    assert told == []
    assert (tmp_path / "rewards.csv").read_text().split() == ["0,0.0", "1,0.25", "2,0.5", "3,0.75"]
