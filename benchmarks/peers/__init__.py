"""Other people's cache policies, written from their published descriptions, for `python -m serving.simulate`."""

from benchmarks.peers.marconi import MARCONI
from benchmarks.peers.sglang import SGLANG
from benchmarks.peers.vllm import VLLM_INTERVAL, VLLM_JUNCTION

POLICIES = (VLLM_INTERVAL, VLLM_JUNCTION, SGLANG, MARCONI)
