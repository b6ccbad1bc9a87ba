"""Converted checkpoints: Orbax inside, one directory outside.

    DST/config.json ...     copies from the Hugging Face directory
    DST/model/              weights that belong to no layer: an Orbax item
    DST/layers/00000/ ...   one Orbax item for each layer of the model, its arrays not stacked
    DST/k3jax.json          the manifest, written last

Stacked over layers in memory, weights are not so on disk: what is written or read at a time is a layer, and a model
can be cut or checked layer by layer.
"""
