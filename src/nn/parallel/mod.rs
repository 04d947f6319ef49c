//! Layers of which every rank has a part.

mod experts;
mod linear;
mod vocabulary;

pub use experts::{parallel_experts, ParallelExperts};
pub use linear::{column_parallel, row_parallel, PartialSum, RowParallel};
pub use vocabulary::{
    vocab_parallel_embedding, vocab_parallel_head, VocabParallelEmbedding, VocabParallelHead, VocabularyShare,
};
