"""`triptych bench peers`: what is started, what is measured, and what the figures say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.checkpoints import write_text_only
from triptych.bench.benchmark import GoodputPlan
from triptych.bench.driver import Round
from triptych.bench.goodput import Slo
from triptych.bench.peers.catalog import PEERS
from triptych.bench.peers.contestant import Contestant, make_ours, make_peer, make_plain
from triptych.bench.peers.measure import Plan, compare, convert
from triptych.bench.peers.peer import SHIM, Command, create_environment
from triptych.bench.peers.picture_trials import (
    MIXED_LIMITS,
    PICTURE_TRIALS,
    good_answers,
    section_of,
    times_sooner_again,
    trials_for,
)
from triptych.bench.peers.results import Entry, Results, Sample, read_results
from triptych.bench.peers.summary import judge, summarise
from triptych.bench.peers.table import tables_of, write_report
from triptych.bench.peers.trials import TRIALS, Bar, Trial, decode_rate, output_rate
from triptych.bench.recorder import Record
from triptych.bench.report import Figures, RoundReport, report_round
from triptych.bench.scenarios import Shape
from triptych.commands.bench_peers import how_to_start, make_contestants
from triptych.config import bundled
from triptych.errors import InvalidRequest, Unavailable
from triptych.ports import free_ports
from triptych.processes import ServiceSpec
from triptych.stack import StackSettings

TOYS = Path(__file__).parent
NOTHING = Figures(
    requests=0, errors={}, duration_s=0, requests_per_s=0, output_tokens_per_s=0, output_tokens=0, prompt_tokens=None,
    counted=0, ttft_s=None, tpot_s=None, itl_s=None, latency_s=None,
)  # fmt: skip
DECODE = TRIALS[0]
LATE = Trial("late", "lateness", "s", "text", Shape(), 1, 1, lambda figures: None, Bar(1.0), better="lower")


def entry(name: str) -> Entry:
    engine, dtype = name.rsplit("-", 1)
    long = {"bf16": "bfloat16", "f32": "float32"}[dtype]
    return Entry(name=name, engine=engine, title=engine.title(), access="wire", dtype=long)


def results(trial: Trial, limit: float | None = None, **values: list[float | None]) -> Results:
    """Keywords are entries, with `_` for `-`; their lists are the rounds."""
    names = {key: key.replace("_", "-") for key in values}
    samples = [
        Sample(round=number, trial=trial.name, entry=names[key], value=value, limit=limit, figures=NOTHING)
        for key, rounds in values.items()
        for number, value in enumerate(rounds)
    ]
    machine: dict[str, str | int] = {"processor": "toy", "cores": 2}
    entries = [entry(name) for name in names.values()]
    return Results(version="0", machine=machine, model="toy", entries=entries, samples=samples)


def test_ratios_are_taken_within_a_round_and_against_the_best_peer_of_the_same_type() -> None:
    found = results(
        DECODE, 200.0,
        triptych_bf16=[150.0, 75.0, 160.0], vllm_bf16=[100.0, 50.0, 100.0], llamacpp_bf16=[60.0, 60.0, 60.0],
        llamacpp_f32=[140.0, 140.0, 140.0],
    )  # fmt: skip
    (verdict,) = judge(found, TRIALS, same_type=True)
    assert (verdict.ours, verdict.peer) == ("triptych-bf16", "vllm-bf16")
    assert (verdict.ratio.low, verdict.ratio.median, verdict.ratio.high) == (1.5, 1.5, 1.6)
    assert verdict.share_of_limit is not None and verdict.share_of_limit.median == 0.75
    assert verdict.met
    (any_type,) = judge(found, TRIALS, same_type=False)
    assert any_type.peer == "llamacpp-f32" and not any_type.met


def test_a_bar_needs_both_the_ratio_and_the_share_of_the_limit() -> None:
    (verdict,) = judge(results(DECODE, 300.0, triptych_bf16=[150.0], vllm_bf16=[50.0]), TRIALS, same_type=True)
    assert verdict.ratio.median == 3 and not verdict.met


def test_where_less_is_better_the_ratio_turns_round() -> None:
    found = results(LATE, triptych_bf16=[0.5], vllm_bf16=[1.0], llamacpp_bf16=[2.0])
    (verdict,) = judge(found, (LATE,), same_type=True)
    assert (verdict.peer, verdict.ratio.median, verdict.met) == ("vllm-bf16", 2.0, True)


def test_failed_rounds_are_counted_not_averaged() -> None:
    found = results(DECODE, None, triptych_bf16=[100.0, None, 120.0], vllm_bf16=[None, None, None])
    ours, theirs = summarise(found, TRIALS)
    assert (ours.rounds, ours.failed, ours.value and ours.value.median) == (2, 1, 110.0)
    assert (theirs.rounds, theirs.value) == (0, None)
    assert judge(found, TRIALS, same_type=True) == []


def test_further_rounds_are_added_and_another_model_is_not(tmp_path: Path) -> None:
    first, second = results(DECODE, triptych_bf16=[1.0, 2.0]), results(DECODE, triptych_bf16=[3.0], vllm_bf16=[4.0])
    file = tmp_path / "r.json"
    file.write_text(first.joined(second).model_dump_json())
    both = read_results(file)
    assert [(one.round, one.entry, one.value) for one in both.samples][2:] == [
        (2, "triptych-bf16", 3.0), (2, "vllm-bf16", 4.0),
    ]  # fmt: skip
    assert [one.name for one in both.entries] == ["triptych-bf16", "vllm-bf16"]
    with pytest.raises(InvalidRequest, match="cannot be added"):
        first.joined(second.model_copy(update={"model": "other"}))
    file.write_text("{}")
    with pytest.raises(InvalidRequest, match="holds no results"):
        read_results(file)


def test_the_report_renews_its_section_and_its_picture(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peers -->\nold\n<!-- end -->\nafter\n")
    found = results(DECODE, 200.0, triptych_bf16=[150.0, 160.0], vllm_bf16=[100.0, 50.0], openvino_f32=[None, None])
    for _ in range(2):
        assert write_report(found, TRIALS[:1], page).read_text("utf-8").startswith("<?xml")
    text = page.read_text("utf-8")
    assert text.startswith("before\n<!-- peers -->\n") and text.endswith("<!-- end -->\nafter\n")
    assert "| Triptych | bf16 | wire | 155 (150 to 160), 78% |" in text
    assert "| Openvino | f32 | wire | failed |" in text
    assert "old" not in text and text.count("![") == 1
    assert len(tables_of(found, TRIALS)) == 2


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_pinned_and_says_how_it_is_installed_and_started(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    assert "==" in peer.requirements[0]
    make, pip, *_ = create_environment(peer, tmp_path / name)
    assert make.argv[:3] == (sys.executable, "-m", "venv")
    assert set(peer.requirements) < set(pip.argv)
    for dtype in peer.dtypes:
        contestant = make_peer(peer, dtype, write_text_only(tmp_path / dtype), tmp_path / "environments", threads=2)
        (service,) = contestant.services
        assert service.argv[0].startswith(str(tmp_path / "environments" / name))
        assert contestant.url.split(":")[-1].removesuffix("/v1") in service.argv
        assert service.address == f"{contestant.url}/models"
        assert "PYTHONPATH" not in service.env


def test_ours_is_the_whole_stack_on_free_ports(tmp_path: Path) -> None:
    folder = write_text_only(tmp_path / "tiny")
    ours = make_ours(folder, "bfloat16", StackSettings.from_environment(), tmp_path)
    assert [service.name for service in ours.services] == ["worker", "router", "gateway"]
    assert ours.services[0].env["TRIPTYCH_WORKER_DTYPE"] == "bfloat16"
    assert ours.services[0].env["TRIPTYCH_WORKER_MODEL_DIR"] == str(folder)


def test_a_model_that_sees_is_exported_first_and_never_answers_from_text_alone(tmp_path: Path) -> None:
    ours = make_ours(bundled("models/demo"), "float32", StackSettings.from_environment(), tmp_path)
    assert [service.name for service in ours.services] == ["triton", "worker", "router", "gateway"]
    export, move = ours.conversions
    repository = str(tmp_path / "converted" / "triptych" / "demo")
    assert "export" in export.argv and move.argv[-1] == repository
    assert ours.services[0].env["TRIPTYCH_TRITON_MODEL_REPOSITORY"] == repository
    assert ours.body["triptych"]["degrade"] is False
    Path(repository).mkdir(parents=True)
    assert not make_ours(bundled("models/demo"), "float32", StackSettings.from_environment(), tmp_path).conversions


def one_round(*requests: tuple[str, float, float]) -> RoundReport:
    """Requests of a label, time to first token and time per output token, in a round of 10 s."""
    records = [
        Record(label, 0, 0.0, 0.0, pieces_s=[ttft], ended_s=ttft + 10 * tpot, output_tokens=11)
        for label, ttft, tpot in requests
    ]
    return report_round(Round(records=records, duration_s=10.0), seed=0)


def test_a_picture_seen_again_is_compared_with_its_first_time() -> None:
    found = one_round(("first", 4.0, 0.0), ("again", 0.1, 0.0), ("again", 0.2, 0.0), ("again", 0.5, 0.0))
    assert times_sooner_again(found) == 20.0


def test_answers_in_mixed_traffic_are_good_within_the_limits_of_their_kind() -> None:
    slow = MIXED_LIMITS["text"].ttft_s + 0.1
    found = one_round(("text", 0.1, 0.01), ("text", slow, 0.01), ("image", slow, 0.01), ("image", slow, 1.0))
    assert good_answers(found) == 0.2


def test_a_bar_may_want_the_figure_itself() -> None:
    (trial,) = (trial for trial in PICTURE_TRIALS if trial.bar.least)
    found = results(trial, triptych_bf16=[20.0], vllm_bf16=[40.0])
    assert [verdict.met for verdict in judge(found, PICTURE_TRIALS, same_type=True)] == [True]
    found = results(trial, triptych_bf16=[9.0], vllm_bf16=[1.0])
    assert [verdict.met for verdict in judge(found, PICTURE_TRIALS, same_type=True)] == [False]


def test_the_model_decides_what_is_measured_and_where_it_is_reported(tmp_path: Path) -> None:
    assert trials_for(bundled("models/demo")) == PICTURE_TRIALS
    assert trials_for(write_text_only(tmp_path / "tiny")) == TRIALS
    assert section_of(results(DECODE, triptych_bf16=[1.0])) == "peers"
    assert section_of(results(PICTURE_TRIALS[0], triptych_bf16=[1.0])) == "peers-toy"


def test_other_engines_are_not_told_of_a_quantization_that_is_undone(tmp_path: Path) -> None:
    folder = write_text_only(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gguf"}}))
    plain = make_plain(folder, tmp_path / "models")
    assert json.loads((plain / "config.json").read_text()) == config
    assert (plain / "model.safetensors").samefile(folder / "model.safetensors")
    assert make_plain(folder, tmp_path / "models") == plain


def test_a_conversion_that_fails_says_why() -> None:
    fails = Command((sys.executable, "-c", "print('no such layer'); raise SystemExit(3)"))
    with pytest.raises(Unavailable, match="no such layer"):
        convert(toy("fast", fails), lambda what: None)
    with pytest.raises(Unavailable, match="--install slow"):
        convert(toy("slow", Command(("/nowhere/pip",))), lambda what: None)


def toy(name: str, *conversions: Command) -> Contestant:
    """A real server of the shim around tests/bench/toy_engine.py."""
    (port,) = free_ports(1)
    options = {"engine": "toy_engine", "model": "-", "name": "toy", "port": port, "dtype": name, "threads": 1}
    argv = (sys.executable, str(SHIM), *(part for key, value in options.items() for part in (f"--{key}", str(value))))
    url = f"http://127.0.0.1:{port}/v1"
    service = ServiceSpec(name, argv, {"PYTHONPATH": str(TOYS)}, f"{url}/models", 30)
    engine = "triptych" if name == "fast" else "slow"
    return Contestant(f"{engine}-f32", engine, name, "our shim", "float32", conversions, (service,), url)


def test_how_an_engine_is_started_can_be_repeated_in_a_shell() -> None:
    contestant = toy("fast", Command(("convert", "a b"), {"LD_PRELOAD": "/lib/x.so"}))
    convert_line, serve_line = how_to_start(contestant)
    assert convert_line.startswith("env ") and convert_line.endswith("LD_PRELOAD=/lib/x.so convert 'a b'")
    assert f"--port {contestant.url.split(':')[-1].removesuffix('/v1')}" in serve_line


@pytest.mark.slow
async def test_engines_take_turns_and_the_faster_one_wins(tmp_path: Path) -> None:
    trials = (
        Trial("decode-1", "decode", "tokens/s", "text", Shape(4, 20), 1, 2, decode_rate, Bar(1.4), limit=DECODE.limit),
    )
    plan = Plan(write_text_only(tmp_path / "tiny"), (toy("fast"), toy("slow")), trials, rounds=2)
    said: list[str] = []
    kept: list[int] = []
    found = await compare(plan, lambda name, line: None, said.append, lambda results: kept.append(len(results.samples)))
    assert kept == [2, 4]  # What a later failure cannot take away.
    assert [one.entry for one in found.samples] == ["triptych-f32", "slow-f32", "slow-f32", "triptych-f32"]
    assert all(one.value and one.limit and not one.figures.errors for one in found.samples)
    (verdict,) = judge(found, trials, same_type=True)
    assert verdict.ratio.median > 2 and verdict.met
    assert said[-1] == "round 2 of 2, decode: triptych-f32"


@pytest.mark.slow
async def test_an_engine_that_does_not_start_is_named(tmp_path: Path) -> None:
    service = ServiceSpec("gone", ("/nowhere/llama-server",), {}, "http://127.0.0.1:1/v1/models", 5)
    gone = Contestant("gone-f32", "gone", "Gone", "own server", "float32", (), (service,), "http://127.0.0.1:1/v1")
    plan = Plan(write_text_only(tmp_path / "tiny"), (gone,), TRIALS, rounds=1)
    with pytest.raises(Unavailable, match="gone-f32"):
        await compare(plan, lambda name, line: None, lambda what: None)


@pytest.mark.slow
async def test_goodput_is_the_highest_rate_that_keeps_the_limits(tmp_path: Path) -> None:
    wanted = GoodputPlan(Slo(2.0, 0.1), start_rate=8, max_rate=8, probe_s=1, max_probes=1)
    trial = Trial(
        "goodput", "goodput", "requests/s", "text-bursts", Shape(4, 4), 1, 1, output_rate, Bar(1.5), goodput=wanted
    )
    plan = Plan(write_text_only(tmp_path / "tiny"), (toy("fast"), toy("lame")), (trial,), rounds=1)
    found = await compare(plan, lambda name, line: None, lambda what: None)
    fast, lame = found.samples
    assert (fast.value, lame.value) == (8, 0)
    assert lame.figures.tpot_s is not None and lame.figures.tpot_s.p50 > 0.1
    assert judge(found, (trial,), same_type=True) == []


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "triptych.cli", "bench", "peers", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_what_was_measured_is_reported_again_as_json(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    file.write_text(results(DECODE, 200.0, triptych_bf16=[150.0], vllm_bf16=[100.0]).model_dump_json())
    done = command("--only-report", "--results", str(file), "--json")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["decode_1_bf16_ratio_to_best_peer"] == 1.5
    assert line["decode_1_bf16_share_of_limit"] == 0.75
    assert line["decode_1_bf16_met"] is True
    assert [row["entry"] for row in line["rows"]] == ["triptych-bf16", "vllm-bf16"]
    assert "vllm" in done.stderr.lower()


@pytest.mark.parametrize(
    ("engine", "says"),
    [("sglang", "is none of triptych, vllm"), ("openvino:float16", "openvino computes in bfloat16, float32, not in")],
)
def test_a_wrong_engine_is_answered_with_the_right_ones(engine: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=says):
        make_contestants([engine], write_text_only(tmp_path / "tiny"), tmp_path)


def test_unless_told_otherwise_what_is_installed_is_compared_in_both_types(tmp_path: Path) -> None:
    (tmp_path / "llamacpp").mkdir()
    made = make_contestants([], write_text_only(tmp_path / "tiny"), tmp_path)
    assert [one.name for one in made] == ["triptych-bf16", "triptych-f32", "llamacpp-bf16", "llamacpp-f32"]


def test_a_peer_does_not_inherit_what_was_set_for_our_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    inherited = Command(("true",), {"KEY": "value"}).environment
    assert {"OMP_WAIT_POLICY", "PYTHONPATH"}.isdisjoint(inherited)
    assert (inherited["OMP_NUM_THREADS"], inherited["KEY"]) == ("1", "value")
