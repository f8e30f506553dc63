"""Plain PyTorch models to plan, test and measure with. One self-contained file per model; none imports autoshard.

Every file has

    SIZES    name -> frozen `Config`, the default first; "tiny" is for tests: what one may split divides by 4
    build    build(size="tiny", *, batch=None, seq=None, **overrides) -> (model, example_inputs)
             `seq` only where the model has a sequence; `overrides` replace fields of the Config
    decoder  optional: decoder(size, *, batch, context) -> (model, inputs): for inference, with keys and values of earlier tokens in
             buffers; inputs(new, start) are those of `new` tokens after `start` others
    loss     loss(output, target) -> scalar, a mean over the global batch

`example_inputs` end with the target and `forward` takes the ones before it, so one training step is

    model, (*inputs, target) = build("tiny")
    loss(model(*inputs), target).backward()

Parameters and inputs are made on torch's current device and dtype, so `with torch.device("meta")` builds
any size without memory. Every module that owns parameters has `reset_parameters`, and no module keeps
state that `reset_parameters` cannot remake: a model built on meta can be materialised piece by piece.
"""
