//! Where our interface is not candle_nn's, each with the reason.

/// Items as checks name them, and why they differ. Every one is shown to differ by a test that must not compile.
pub const DIFFERENCES: &[(&str, &str)] = &[
    ("embedding::Embedding: candle_nn's own", "ours may have a packed table"),
    ("linear::Linear: candle_nn's own", "ours may have a packed weight"),
    ("rnn::GRU: candle_nn's own", "`GRU::new` takes our `VarBuilder`"),
    ("rnn::LSTM: candle_nn's own", "`LSTM::new` takes our `VarBuilder`"),
    ("var_builder::Rename::new", "`Rename` is candle_nn's own and holds candle_nn's `VarBuilder`"),
    ("var_builder::VarBuilder: candle_nn's own", "ours knows where packed weights are"),
];
