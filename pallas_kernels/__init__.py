"""The hot ops of Kimi K3, one folder each; `docs/design.md` has their interfaces.

>>> from pallas_kernels.kda_prefill import kda_prefill
"""
