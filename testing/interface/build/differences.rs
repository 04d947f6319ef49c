//! Where our interface is not candle_nn's, each with the reason.

/// Items as checks name them, and why they differ. Every one is shown to differ by a test that must not compile.
pub const DIFFERENCES: &[(&str, &str)] = &[
    ("embedding::Embedding: candle_nn's own", "ours may have a packed table"),
    ("embedding::Embedding::embeddings", "a packed table is no dense tensor"),
    ("linear::Linear: candle_nn's own", "ours may have a packed weight"),
    ("linear::Linear::weight", "a packed weight is no dense tensor"),
    ("rnn::GRU: candle_nn's own", "`GRU::new` takes our `VarBuilder`"),
    ("rnn::LSTM: candle_nn's own", "`LSTM::new` takes our `VarBuilder`"),
    ("var_builder::Rename::new", "`Rename` is candle_nn's own and holds candle_nn's `VarBuilder`"),
    ("var_builder::VarBuilder: candle_nn's own", "ours knows where packed weights are"),
    ("var_builder::VarBuilder.dtype", "a method of this name exists, a field does not"),
    ("var_builder::VarBuilder::from_backend", "not there yet"),
    ("var_builder::VarBuilder::from_buffered_safetensors", "not there yet"),
    ("var_builder::VarBuilder::from_mmaped_safetensors", "not there yet"),
    ("var_builder::VarBuilder::from_npz", "not there yet"),
    ("var_builder::VarBuilder::from_pth", "not there yet"),
    ("var_builder::VarBuilder::from_pth_with_state", "not there yet"),
    ("var_builder::VarBuilder::from_slice_safetensors", "not there yet"),
    ("var_builder::VarBuilder::from_tensors", "not there yet"),
    ("var_builder::VarBuilder::from_varmap", "not there yet"),
    ("var_builder::VarBuilder::new_with_args", "not there yet"),
    ("var_builder::VarBuilder::rename", "not there yet"),
    ("var_builder::VarBuilder::rename_f", "not there yet"),
    ("var_builder::VarBuilder::zeros", "not there yet"),
];
