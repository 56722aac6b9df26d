//! What a side is asked for.

use anyhow::Result;

/// A model that is loaded.
pub trait Model {
    /// The tokens of a text.
    fn tokens(&self, text: &str) -> Result<Vec<u32>>;
    /// An empty sequence with room for as many tokens.
    fn open(&self, positions: usize) -> Result<Box<dyn Sequence + '_>>;
}

/// Tokens whose keys and values are held.
pub trait Sequence {
    /// Reads `ids` behind the first `position` tokens, whatever stood there before, and gives the
    /// likeliest token to follow.
    fn read(&mut self, position: usize, ids: &[u32]) -> Result<u32>;
}
