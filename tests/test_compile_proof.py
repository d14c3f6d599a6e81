"""Proof by compilation: what is read from a compiled program, and that the step is divided as it should be."""

import dataclasses
import json

import pytest

from benchmarks import compile_proof as proof
from benchmarks import weak_scaling
from benchmarks.compile_proof import CASES
from kvsparse_jax import plan

HLO = """
%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %gather = ((bf16[1,16]{1,0}, s8[2]{0}), (bf16[8,16]{1,0}, s8[16]{0})) all-gather-start(%x, %z), \
replica_groups=mesh['data'=2,'fsdp'=8,'tensor'=1] {'fsdp'}, dimensions={0}
  %done = bf16[8,16]{1,0} all-gather-done(%gather)
}

%less (p: (s32[])) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%other (p: (s32[])) -> (s32[]) {
  %all = u8[4] all-to-all(%w), replica_groups={{0,9},{1,8}}
}

ENTRY %main (a: f32[]) -> f32[] {
  %while.1 = (s32[], bf16[8,16]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"30"}}
  %sum = f32[5]{0} all-reduce(%y), replica_groups=[8,2]<=[2,8]T(1,0), to_apply=%add
  %while.2 = (s32[]) while(%u), condition=%less, body=%other
}
"""


def test_collectives_are_counted_through_loops():
    assert sorted(proof.collectives(HLO), key=lambda c: c.kind) == [
        proof.Collective("all-gather", "bf16[8, 16]", 256, 30, 256 + 16, 8, 1),
        proof.Collective("all-reduce", "f32[5]", 20, 1, 20, 2, 2),
        proof.Collective("all-to-all", "u8[4]", 4, 7, 4, 2, 2),
    ]
    assert [one.sent for one in proof.collectives(HLO)] == [272 * 7 / 8, 2.0, 20.0]


@pytest.mark.parametrize("name", ["cpu", "cpu-tensor"])
def test_step_is_divided(name):
    found = proof.prove(CASES[name])
    assert not found["faults"]
    gathers = found["collectives"]["all-gather"]
    if CASES[name].mesh[1] > 1:  # every layer's weights come together, three times: teacher, student, once more
        assert gathers["runs"] > 3 * 30
        assert gathers["bytes"] > 3 * 30 * 576 * 1536 * 2
    else:
        assert gathers["bytes"] < 1e6


def test_a_step_left_to_the_compiler_is_found_out(monkeypatch):
    """Without constraints XLA keeps the weights in pieces, and every device computes all rows."""
    made = proof.make_step
    monkeypatch.setattr(proof, "make_step", lambda *args, **settings: made(*args, **settings | {"mesh": None}))
    assert any("all rows" in fault for fault in proof.prove(CASES["cpu"])["faults"])


def test_memory_grows_with_the_length_not_its_square():
    bytes_of = [
        proof.prove(dataclasses.replace(CASES["cpu"], length=length))["temporary_bytes"] for length in (2048, 4096)
    ]
    assert bytes_of[1] < 2.1 * bytes_of[0]


@pytest.mark.parametrize("name", ["cpu-decode", "cpu-decode-tensor"])
def test_decode_step_takes_what_the_planner_counts(name):
    """On a mesh each device has the pages of its heads, and nothing gathers them."""
    found = proof.prove(CASES[name])
    assert not found["faults"] and bool(found["collectives"]) == (name == "cpu-decode-tensor")
    # Weights, pages and tables; XLA:CPU's temporaries are float32 copies of weights, which no accelerator makes.
    assert found["argument_bytes"] == pytest.approx(found["planned_bytes"], rel=0.03)


def test_a_decode_step_without_its_kernel_is_found_out():
    """And one that copies a pool: temporaries as large as the keys."""
    call = '%ragged_decode.1 = f32[8,128]{1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call"'
    assert not proof.kernel_faults(call, 100, 99)
    assert "not in it" in proof.kernel_faults(HLO, 100, 99)[0]
    assert "a pool is copied" in proof.kernel_faults(call, 100, 100)[0]


def test_bad_case(capsys):
    assert proof.main(["--case", "gpu"]) == 2
    assert "no case is named gpu" in capsys.readouterr().err


def test_scaling_on_paper(tmp_path, capsys):
    """By hand: what is sent over what links attain; dense products are 2 FLOPs per weight, token and pass."""
    case = dataclasses.replace(CASES["h100x64-qwen3-8b"], length=1)
    gather = {"runs": 1000, "sent": 450e9, "sent_between_hosts": 0}
    reduce = {"runs": 0, "sent": 0, "sent_between_hosts": 100e9}
    found = weak_scaling.scaling(
        case, {"a": gather, "b": reduce}, plan.find("H100"), 50e9, plan.Efficiency(bandwidth=0.5, flops=0.5)
    )
    assert (found.devices, found.seconds_host, found.seconds_network) == (64, pytest.approx(2.008), 4.0)
    assert found.flops == pytest.approx(4 * 2 * (8.19e9 - 151936 * 4096), rel=1e-3)
    assert found.apart == pytest.approx(found.seconds_products / (found.seconds_products + 6.008))
    target = tmp_path / "scaling.json"
    assert weak_scaling.main(["--json", str(target)]) == 0  # of the stored report
    stored = json.loads(target.read_text())
    assert stored["h100x8-qwen3-8b"]["network_bytes"] == 0 < stored["h100x512-qwen3-8b-fsdp"]["network_bytes"]
    assert 0.5 < stored["h100x512-r1-32b-fsdp"]["apart"] < stored["h100x512-r1-32b"]["apart"] < 1
    assert weak_scaling.main(["--report", str(tmp_path / "none.json")]) == 2
    assert "there is no" in capsys.readouterr().err
