"""The page and what else is made of a run's summary: complete, well-formed, safe to open."""

from html.parser import HTMLParser

import pytest

from dflash_core.decoding.report import AcceptanceGroup, AcceptanceReport, Exactness
from dflash_core.reporting import (
    CorpusFacts,
    ProfileFacts,
    RunSummary,
    StrategyFacts,
    TrainingFacts,
    headline,
    length_bars,
    markdown,
    render_page,
    strategy_table,
)
from dflash_core.throughput import GateResult, GateVerdict, Prediction

VOID = {"meta", "br", "img", "hr", "link"}


def prediction(ktok_s: float) -> Prediction:
    return Prediction(
        ktok_s=ktok_s,
        low=ktok_s * 0.9,
        high=ktok_s * 1.1,
        step_s=0.5,
        epoch_s=50,
        run_s=150,
        device_hours=0.08,
        bottleneck="draft",
        waiting_share=0.1,
        starving_share=0,
        target_busy=0.4,
        prefetch_busy=0.02,
        draft_busy=0.6,
        prefetch_queue=1,
        feature_queue=1,
    )


def strategy(name: str, ktok_s: float) -> StrategyFacts:
    return StrategyFacts(
        name=name,
        mixing="diverse",
        padding_efficiency=0.93,
        num_micro_batches=1_200,
        num_steps=300,
        length_eta2=0.8,
        step_length_eta2=0.02,
        pair_recurrence=0.004,
        straggler_factor=1.02,
        prediction=prediction(ktok_s),
    )


def verdict(name: str, passed: bool) -> GateVerdict:
    reason = f"{name}/diverse: 4.0 Ktok/s {'>=' if passed else '<'} 4 & <more>"
    return GateVerdict(name=name, mixing="diverse", passed=passed, straddles=False, reason=reason)


def rejected() -> RunSummary:
    """A run whose strategies were all rejected, with a name that is no HTML."""
    return RunSummary(
        name="<b>night</b>",
        started="2026-11-29 10:00",
        target="toy & co",
        hardware="2 CPU cores",
        environment={"commit": "abc1234", "torch": "2.13.0"},
        corpus=CorpusFacts(
            source="files", num_train=5, num_held_out=2, num_regenerated=3, num_kept=2
        ),
        profile=ProfileFacts(
            num_samples=5,
            total_tokens=1_000,
            total_supervised=400,
            quantiles={"P50": 100, "max": 420},
            lengths=(90, 100, 420),
            counts=(2, 2, 1),
            edges=(100, 420),
        ),
        strategies=(strategy("sorted", 4), strategy("random", 2)),
        gate=GateResult(
            verdicts=(verdict("sorted", False), verdict("random", False)),
            chosen=None,
            reason="none passes",
        ),
    )


@pytest.fixture
def finished() -> RunSummary:
    group = AcceptanceGroup(
        num_prompts=3, num_tokens=90, num_verifications=50, tau=1.8, tau_mean=1.9
    )
    return rejected().model_copy(
        update={
            "gate": GateResult(
                verdicts=(verdict("sorted", True), verdict("random", False)),
                chosen=0,
                reason="sorted/diverse is taken",
            ),
            "training": TrainingFacts(
                strategy="sorted/diverse",
                num_steps=4,
                epochs=1,
                seconds=2,
                measured_ktok_s=5,
                predicted_ktok_s=4,
                final_loss=1.25,
                acceptance_at_anchors=1.6,
                peak_memory_bytes=10**9,
                losses=(3, 2, 1.5, 1.25),
                acceptances=(1, 1.2, 1.5, 1.6),
            ),
            "acceptance": AcceptanceReport(
                overall=group,
                by_domain={"code": group},
                by_prompt_length={"1..64": group},
                histogram=(20, 30, 0, 0),
                block_size=4,
                max_new_tokens=30,
                batch_size=1,
                temperature=0,
                dtype="float32",
                exactness=Exactness(
                    num_identical=3,
                    num_ties=0,
                    num_faults=0,
                    identical_share=1,
                    largest_gap=0,
                    tie_gap=1e-4,
                ),
                speculative_tokens_per_s=90,
                plain_tokens_per_s=100,
                speedup=0.9,
            ),
            "model_version": "dflash-drafter version 3 (challenger)",
        }
    )


class Reader(HTMLParser):
    """Checks that elements close in order and collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        links = [value for name, value in attrs if name in {"src", "href", "xlink:href"} and value]
        self.fetched += [link for link in links if not link.startswith("#")]
        if tag in {"script", "iframe", "object"} or any(name.startswith("on") for name, _ in attrs):
            self.fetched.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"h1", "h2"}:
            self.headings.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return reader


def test_a_finished_run_has_every_part_and_fetches_nothing(finished: RunSummary) -> None:
    page = render_page(finished)
    reader = read(page)
    assert reader.fetched == []
    assert reader.headings == [
        "<b>night</b>",
        "Gate",
        "Strategies",
        "Sequence lengths",
        "Training",
        "Acceptance by real speculative decoding",
        "Environment",
    ]
    assert page.count("<svg") == 5 == page.count('<figure role="img" aria-label="')
    assert "<b>" not in page and "toy &amp; co" in page
    assert "0.90x plain decoding at batch size 1, slower than plain decoding" in page
    assert "5.00 Ktok/s measured, 4.00 predicted (-20.0%)" in page


def test_a_rejected_run_leaves_out_what_did_not_happen() -> None:
    summary = rejected()
    headings = read(render_page(summary)).headings
    assert "Training" not in headings and "Environment" in headings
    assert [name for name, _ in headline(summary)] == ["corpus", "gate"]


def test_figures_are_readable_on_light_and_dark_pages(
    finished: RunSummary,
) -> None:
    page = render_page(finished)
    assert "#000000" not in page and "fill: #ffffff" not in page
    assert "svg { fill: currentColor" in page, "text without a colour of its own takes the page's"


def test_tables_hold_a_row_for_each_strategy_in_order(finished: RunSummary) -> None:
    table = strategy_table(finished)
    assert [row[0] for row in table.rows] == ["sorted", "random"]
    assert table.columns["gate"] == ["chosen", "rejected"]
    lines = markdown(table).splitlines()
    assert len(lines) == 4 and {line.count("|") for line in lines} == {len(table.headings) + 1}


def test_bars_count_every_sample_once() -> None:
    lines = length_bars(rejected().profile).splitlines()
    assert sum(int(line.split()[-1]) for line in lines[:-1]) == 5
    assert lines[-1] == "bucket edges: 100, 420"
