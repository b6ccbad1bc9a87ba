"""The schedule covers every layer once, in order, with few programs."""

from hypothesis import given
from hypothesis import strategies as st

from k3jax.presets import KIMI_K3, KIMI_LINEAR_48B
from k3jax.schedule import schedule


def unrolled(segments):
    """(layer, kind) in the order in which the model runs them."""
    for segment in segments:
        layer = segment.first
        for _ in range(segment.repeats):
            for run in segment.runs:
                for _ in range(run.count):
                    yield layer, run.kind
                    layer += 1


def programs(segments):
    return sum(len(segment.runs) for segment in segments)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60))
def test_covers_any_pattern(kinds):
    assert list(unrolled(schedule(kinds))) == list(enumerate(kinds))


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=5), st.integers(2, 40))
def test_repetition_does_not_add_programs(group, repeats):
    assert programs(schedule(group * repeats)) <= 2 * len(group) + 1


def test_the_published_models_are_short():
    for config, most in ((KIMI_K3, 6), (KIMI_LINEAR_48B, 8)):
        assert programs(schedule(list(zip(config.layer_types, config.mlp_types)))) <= most
