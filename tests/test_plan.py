"""The planner: its numbers against counts by hand and what XLA allocates, its mistakes, and what it prints."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sharding
from k3jax.cli.plan import main
from k3jax.errors import UserError
from k3jax.plan import workload
from k3jax.plan.collectives import Collectives, count_collectives
from k3jax.plan.compile import Compiled, Request, compile_apart
from k3jax.plan.estimate import active_parameters, estimate, floors
from k3jax.plan.hardware import GIB, Topology
from k3jax.plan.liveness import peak_bytes
from k3jax.plan.plan import StepPlan, make_plan
from k3jax.plan.report import to_text
from k3jax.plan.search import Question, candidates, most_that_fit, remedies
from k3jax.plan.workload import Workload
from k3jax.presets import DEMO, KIMI_K3, KIMI_LINEAR_48B, PRESETS
from tests.checkpoints import copy_checkpoint, tiny_checkpoint
from tests.golden import tiny_model

SLICE = Topology.parse("tpu7x:4x4x4")
MESH = {"data": 1, "expert": 4, "seq": 8, "tensor": 4}
EIGHT = {"data": 1, "expert": 2, "seq": 2, "tensor": 2}
LOAD = Workload()


def decode_program(sizes=MESH, load=LOAD, config=KIMI_K3, topology=SLICE):
    return Question("decode", config, topology, load).program(sizes, "decode")


# Sizes


def test_weights_are_within_2_percent_of_a_count_by_hand():
    """Kimi K3 over 4 expert x 8 seq x 4 tensor, from the published sizes and the table in docs/scaling.md."""
    counted = estimate(decode_program(), trace=False).weights
    d, heads, experts = 7168, 96 * 128, 92 * 896 * 3 * 3584 * 3072
    by_hand = {
        # Half a byte a code and a byte for 32; over all 128 devices.
        "routed experts": experts * (1 / 2 + 1 / 32) / 128,
        # q, k, v, gate and output over 32, low-rank decay in whole.
        "KDA": 69 * 2 * (5 * heads * d / 32 + 128 * d),
        # Query, output and gate over 32, keys and values of the latent over 4, the two down-projections in whole.
        "MLA": 24 * 2 * ((96 * 192 * 1536 + 2 * heads * d) / 32 + 96 * 256 * 512 / 4 + (1536 + 576) * d),
        # The router in whole; two latent projections and three of the shared experts over 32.
        "router, latent and shared experts": 92 * 2 * (896 * d + (2 * 3584 * d + 3 * 6144 * d) / 32),
        "embeddings and head": 2 * 2 * 163840 * d / 32,
        "dense MLP": 2 * 3 * 33792 * d / 32,
    }
    assert set(counted) - {"norms and AttnRes"} == set(by_hand)
    for kind, count in by_hand.items():
        assert counted[kind] == pytest.approx(count, rel=0.02), kind
    assert sum(counted.values()) == pytest.approx(sum(by_hand.values()), rel=0.02)


def test_state_and_cache_are_those_of_the_sequences():
    state = estimate(decode_program(), trace=False).state
    slots = 64 // 4 + 1
    assert state["KDA states"] == 69 * slots * 96 // 32 * 128 * 128 * 4
    assert state["conv tails"] == 69 * slots * 3 * 96 // 32 * 128 * 3 * 2
    # 576 values in rows of 640 on a TPU; a dummy page a block.
    assert state["MLA cache"] == 24 * (16 * 1024 + 1) * 16 * 640 * 2


def test_one_device_needs_what_a_loaded_model_has():
    lm = tiny_model("k3-tiny")
    program = decode_program(dict.fromkeys(MESH, 1), Workload(2, 1024), lm.config, Topology.parse("cpu:1"))
    counted = estimate(dataclasses.replace(program, dtype=jnp.float32), trace=False)
    assert sum(counted.weights.values()) == sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))


def test_active_parameters_are_the_published_ones():
    assert active_parameters(KIMI_K3) == 104_189_612_640
    assert active_parameters(KIMI_LINEAR_48B) == 3_106_972_544


def test_floors_of_a_decode_step_at_its_simplest():
    """With a token a device reads nearly nothing of the experts, and everything else once."""
    program = decode_program(load=Workload(4, 128))
    counted = estimate(program, trace=False)
    times = floors(program, counted, SLICE.device, received=3 * 10**9)
    experts = counted.weights["routed experts"]
    hit = 1 - (1 - 16 / 896) ** 4
    rest = sum(counted.weights.values()) - experts - counted.weights["embeddings and head"] / 2
    states = 2 * (counted.state["KDA states"] + counted.state["conv tails"]) + counted.state["MLA cache"]
    assert times.memory == pytest.approx((hit * experts + rest + states) / 3.69e12)
    attention = 4 * 128 * 24 * 96 * 2 * (576 + 512)
    assert times.compute == pytest.approx((2 * 4 * 104_189_612_640 + attention) / 128 / 1.153e15)
    assert times.links == pytest.approx(0.01) and times.step == times.links


def test_values_are_counted_while_they_live():
    """Beside the arguments; in whose place a result may lie."""
    def live(function, *shapes):
        jaxpr = jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr
        return peak_bytes(jaxpr, lambda aval: math.prod(aval.shape) * aval.dtype.itemsize)

    def updated(pool, row):
        return pool.at[3].set(row)

    assert live(jnp.sin, (100,)) == 400
    assert live(lambda x: jnp.sin(jnp.cos(x)), (100,)) == 400
    assert live(updated, (1000, 4), (4,)) < 200
    product = 10 * 30 * 4
    assert live(lambda x, y: (x @ y).sum(), (10, 20), (20, 30)) == product + 4
    # Two products at a time: the first is needed until the end, the second turns into its sine.
    assert live(lambda x, y: (x @ y) / jnp.sin(x @ y), (10, 20), (20, 30)) == 2 * product
    assert live(lambda x: (x @ x) @ (x @ x), (10, 10)) == 3 * 400
    # A loop's turns use the same memory: two matrices and a number.
    assert live(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: x @ x @ x, x), (10, 10)) == 804


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["decode", "prefill"])
def test_estimated_arguments_of_a_prefill_are_what_the_compiler_allocates(strategy):
    load, config = Workload(8, 1024, 1024), DEMO.first_layers(4)
    program = Question("prefill", config, Topology.parse("cpu:8"), load).program(EIGHT, strategy)
    counted = estimate(program)
    compiled = compile_apart(Request("prefill", strategy, config, EIGHT, load, "cpu:8"))
    # Small arrays are padded.
    assert compiled.arguments == pytest.approx(counted.arguments, rel=0.01)
    assert compiled.outputs - compiled.aliased == pytest.approx(counted.outputs, rel=0.05, abs=4096)


# Collectives


def test_collectives_are_counted_as_often_as_they_run():
    """A program for 8 CPUs of which all is known: a scan of 5 turns with a sum, a gather after it, nested branches."""
    code = """
import jax, jax.numpy as jnp, sys
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def local(x):
    def turn(x, _):
        return jax.lax.psum(x, "x") * 0.5, None
    x, _ = jax.lax.scan(turn, x, None, length=5)
    x = jax.lax.cond(x[0] > 0, lambda x: jax.lax.psum_scatter(x, "x", tiled=True), lambda x: x[:2], x)
    return jax.lax.all_gather(x, "x", tiled=True)
step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
print(step.lower(jnp.ones(16)).compile().as_text())
"""
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PATH": ""}
    text = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert count_collectives(text) == {
        "all-reduce": Collectives(5, 5 * 64), "all-gather": Collectives(1, 64), "reduce-scatter": Collectives(1, 8)
    }


# Search


def test_the_axes_are_those_of_sharding():
    assert workload.MESH_AXES == sharding.MESH_AXES


def test_every_mesh_is_tried_and_the_chosen_one_fits():
    found = candidates(Question("decode", KIMI_K3, SLICE, Workload()))
    assert all(math.prod(mesh.sizes.values()) == 128 for mesh in found)
    assert len({tuple(mesh.sizes.values()) for mesh in found}) == len(found)
    best = found[0]
    assert best.peak < SLICE.usable_bytes and best.cost <= 1.1 * min(mesh.cost for mesh in found)
    # 96 heads do not split over 128 devices, and a page of 128 tokens not over more.
    assert all(96 % (mesh.sizes["seq"] * mesh.sizes["tensor"]) == 0 for mesh in found)


def test_most_that_fit():
    assert [most_that_fit(lambda n: n <= limit, 100) for limit in (0, 1, 63, 100, 500)] == [0, 1, 63, 100, 100]


def test_what_would_make_it_fit_does_and_a_little_more_does_not():
    small, load = Topology.parse("v6e:8x8"), Workload()
    question = Question("decode", KIMI_K3, small, load)
    assert candidates(question)[0].peak > small.usable_bytes
    fewer, shorter, larger = remedies(question, None, 0)
    assert larger == "v6e:8x16, 128 devices of 32 GiB"

    def peak(**changes):
        return candidates(dataclasses.replace(question, workload=dataclasses.replace(load, **changes)))[0].peak

    count = int(fewer.split()[0])
    assert peak(sequences=count) <= small.usable_bytes < peak(sequences=count + 1)
    tokens = int(shorter.split()[3].replace(",", ""))
    assert peak(context=tokens) <= small.usable_bytes < peak(context=tokens + 128)


# The command


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


MISTAKES = {
    "--topology cpu:8": "expected --preset or --checkpoint",
    "--preset kimi-k4 --topology cpu:8": "no preset 'kimi-k4'; there are kimi-k3, kimi-linear-48b, demo",
    "--preset demo": "arguments are required: --topology",
    "--preset demo --topology tpu9:2x2": "topology is 'tpu9:2x2', expected one of tpu7x:AxBxC, v5p:AxBxC, v6e:AxB, "
    "v5e:AxB, h200:N, cpu:N",
    "--preset demo --topology v5p:4x4": "topology is 'v5p:4x4', expected one of",
    "--preset demo --topology cpu:0": "topology is 'cpu:0', expected one of",
    "--preset demo --topology h200": "topology is 'h200', expected one of",
    "--preset demo --topology cpu:8 --mesh expert=16": "mesh expert=16 has 16 devices, and cpu:8 has 8",
    "--preset demo --topology cpu:8 --mesh tensor=8": "axis 'kda_heads' of size 4 does not split over tensor 8 "
    "devices; sizes that would work: 1, 2",
    "--preset demo --topology cpu:8 --mesh heads=8": "mesh is 'heads=8', expected sizes of the axes data, expert, seq,",
    "--preset demo --topology cpu:8 --mesh expert=0": "mesh is 'expert=0', expected sizes",
    "--preset demo --topology cpu:8 --context 5000": "context is 5000 tokens, and this model takes 4096 at most",
    "--preset demo --topology cpu:8 --context 0": "argument --context: '0' is not a whole number of at least 1",
    "--preset demo --topology cpu:8 --sequences 1.5": "argument --sequences: '1.5' is not a whole number",
    "--preset demo --topology cpu:8 --cache-gib 0": "--cache-gib is 0, expected a positive number",
    "--preset demo --topology cpu:8 --cache-gib nan": "--cache-gib is nan, expected a positive number",
    "--preset demo --topology cpu:8 --cache-gib many": "argument --cache-gib: 'many' is not a number",
    "--preset kimi-k3 --topology h200:16 --cache-gib 150": "--cache-gib is 150, and 128.6 GiB of a device may be used",
    "--preset kimi-k3 --topology h200:16 --cache-gib 0.1": "--cache-gib is 0.1, too little for one sequence of 131,072",
    "--preset demo --topology cpu:8 --cache-gib 1 --sequences 3": "not allowed with argument",
    "--checkpoint nowhere --topology cpu:8": "no checkpoint 'nowhere'",
    "--preset demo --topology cpu:8 --chunk 0": "argument --chunk: '0' is not a whole number",
    "--preset demo --topology cpu:8 --sequences 2 --context 512 --chunk 2000": "chunk is 2000 tokens, and 2 sequences",
    "--preset kimi-k3 --topology tpu7x:99x99x99": "has 1,940,598 devices, expected at most 8,192",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(arguments, capsys):
    code, out, err = run(capsys, *arguments.split())
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("k3jax: error: ") and MISTAKES[arguments] in err


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, capsys):
    tiny = tiny_checkpoint("k3-tiny")
    code, out, err = run(capsys, "--checkpoint", str(tiny), "--preset", "kimi-k3", "--topology", "cpu:8")
    assert code == 2 and err.startswith(f"k3jax: error: {tiny} is not kimi-k3: vocab_size is ") and err.count("\n") == 1
    # Its own config.json contradicts the tensors.
    other = copy_checkpoint("k3-tiny", tmp_path, {})
    values = json.loads((other / "config.json").read_text())
    values["text_config"]["num_experts"] = 32
    (other / "config.json").write_text(json.dumps(values))
    code, out, err = run(capsys, "--checkpoint", str(other), "--topology", "cpu:1")
    assert code == 2 and err.count("\n") == 1 and "gate.weight has shape [16, 128], expected [32, 128]" in err


def test_an_unknown_shape_of_a_slice_is_refused_by_the_compiler():
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    request = Request("decode", "decode", DEMO, dict.fromkeys(MESH, 1), Workload(2, 128), "v6e:3x3")
    with pytest.raises(UserError, match="the TPU compiler has no topology v6e:3x3: "):
        compile_apart(request)


def test_mistakes_are_found_before_jax_is_imported():
    code = "import sys; from k3jax.cli.plan import main; main(sys.argv[1].split()); print('jax' in sys.modules)"
    for arguments in ("--preset demo --topology nothing", "--preset demo --topology cpu:8 --mesh expert=3"):
        done = subprocess.run([sys.executable, "-c", code, arguments], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False" and "error" in done.stderr


def test_the_report_and_json_say_the_same(capsys):
    arguments = "--preset demo --topology h200:8 --sequences 16 --context 4096 --step decode".split()
    code, out, err = run(capsys, *arguments)
    assert code == 0 and out.startswith("demo on h200:8: 8 devices of 139.8 GiB")
    code, printed, err = run(capsys, *arguments, "--json")
    plan = json.loads(printed)
    assert code == 0 and plan["fits"] is True and plan["sequences"] == 16 and plan["devices"] == 8
    (step,) = plan["steps"]
    assert step["fits"] is True and step["compiled"] is None and step["collectives"] is None
    assert f"decode step of {step['tokens']} tokens" in out and "FITS" in out
    total = step["estimate"]["peak"]
    assert step["peak"] == total == sum(
        (*step["estimate"]["weights"].values(), *step["estimate"]["state"].values(),
         *(step["estimate"][name] for name in ("inputs", "outputs", "temporaries")))
    )
    assert f"{total / GIB:.2f}" in next(line for line in out.splitlines() if line.startswith("  sum"))


def test_what_does_not_fit_says_so_and_what_would(capsys):
    arguments = ("--preset", "kimi-k3", "--topology", "h200:8", "--step", "decode")
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "DOES NOT FIT" in out and "over the limit" in out
    assert "it would fit with h200:16, 16 devices" in out
    assert json.loads(run(capsys, *arguments, "--json")[1])["fits"] is False


def test_a_budget_is_filled(capsys):
    arguments = ("--preset", "kimi-k3", "--topology", "tpu7x:4x4x4", "--step", "decode", "--cache-gib", "20", "--json")
    plan = json.loads(run(capsys, *arguments)[1])
    (step,) = plan["steps"]
    held = sum(step["estimate"]["state"].values())
    assert held <= 20 * GIB < held * (plan["sequences"] + step["blocks"]) / plan["sequences"] + 10**8


def test_a_gpu_cannot_be_compiled_for_and_the_estimate_is_printed(capsys):
    code, out, err = run(capsys, "--preset", "demo", "--topology", "h200:2", "--context", "512", "--compile", "--step",
                         "decode")
    assert code == 0 and "compiled" not in out and "no compiler for absent GPUs" in err


def test_compiling_puts_the_compilers_numbers_beside_the_estimate(capfd):
    """What the compiler prints comes from below Python, and is not seen."""
    code = main((
        "--checkpoint random:demo:4 --topology cpu:8 --mesh expert=2,seq=2,tensor=2 --sequences 8 --context 512 "
        "--step decode --compile --json"
    ).split())
    out, err = capfd.readouterr()
    assert code == 0 and all(line.startswith(("tracing the", "compiling the")) for line in err.splitlines())
    (step,) = json.loads(out)["steps"]
    counted, compiled = step["estimate"], step["compiled"]
    arguments = sum((*counted["weights"].values(), *counted["state"].values(), counted["inputs"]))
    assert compiled["arguments"] == pytest.approx(arguments, rel=0.01)  # small arrays are padded
    assert compiled["outputs"] - compiled["aliased"] == pytest.approx(counted["outputs"], rel=0.05, abs=4096)
    assert step["peak"] == compiled["peak"] == (
        compiled["arguments"] + compiled["outputs"] + compiled["temporaries"] - compiled["aliased"] + compiled["code"]
    )
    assert compiled["seconds"] > 0 and compiled["host_bytes"] > GIB / 8
    assert step["collectives"]["all-reduce"]["count"] > 0 and step["fits"] is True


def test_the_compilers_word_counts():
    """Made-up numbers of a compiler: a peak over the limit, and a refusal."""
    plan = make_plan("demo", DEMO, Topology.parse("v6e:2x2"), Workload(8, 512, 512), kinds=("decode",))
    (step,) = plan.steps
    assert plan.fits

    def judged(compiled: Compiled) -> tuple[StepPlan, str]:
        told = dataclasses.replace(step, compiled=compiled)
        return told, to_text(dataclasses.replace(plan, steps=(told,)))

    large = Compiled(20 * GIB, 5 * GIB, 15 * GIB, 4 * GIB, GIB // 4, 61.0, GIB)
    told, text = judged(large)
    assert told.peak == 36.25 * GIB and not told.fits and "DOES NOT FIT" in text
    assert "compiled in 61 s with 1.0 GiB" in text and "estimate  compiler" in text
    peak = next(line for line in text.splitlines() if line.startswith("  peak"))
    assert "36.25" in peak and "over the limit" in peak
    told, text = judged(dataclasses.replace(large, temporaries=GIB))
    assert told.fits and "DOES" not in text
    told, text = judged(Compiled(refusal="Ran out of memory (99G)"))
    assert told.peak is None and not told.fits and "the compiler refused in 0 s" in text


@pytest.mark.parametrize("name", PRESETS)
def test_placements_are_those_that_the_model_loads_with(name):
    """The planner has no table of its own: what it counts is what `sharding` places."""
    config = PRESETS[name]
    program = decode_program(EIGHT, Workload(4, 256), config, Topology.parse("cpu:8"))
    bank = next(leaf for path, leaf in jax.tree_util.tree_flatten_with_path(program.params)[0]
                if path[-1].key.startswith("experts_gate_up"))
    assert bank.sharding.spec == PartitionSpec(None, ("expert", "seq"), None, ("tensor",), None)
    assert np.prod(bank.sharding.shard_shape(bank.shape)) * 8 == np.prod(bank.shape)
