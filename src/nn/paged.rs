//! Self-attention of many sequences whose keys and values are in pages.

use super::{Attention, Norm, RotaryEmbedding};
use crate::ops::{
    PagePool, PageTable, PagedAppend, PagedAttention, RaggedQueries, RotaryTables, TokenMap,
    paged_append, paged_attention, paged_prefill,
};
use candle_core::{Result, Tensor};

/// N tokens of any sequences, and where their keys and values are: first the sequences that have one token, then
/// those that have several.
#[derive(Debug)]
pub(crate) struct PagedTokens {
    /// `[N]`, u32: the sequence of each token.
    pub owners: Tensor,
    /// `[N]`, u32: its position.
    pub positions: Tensor,
    /// Of all sequences, whose lengths count these tokens.
    pub table: PageTable,
    /// How many sequences have one token, and their part of the table; none if there are none.
    pub singles: Option<(usize, PageTable)>,
    /// Of the others, if there are any.
    pub ragged: Option<(PageTable, RaggedQueries)>,
}

impl Attention {
    /// `x + attention(norm(x))` for x `[1, N, H]`.
    ///
    /// # Errors
    /// If shapes do not fit, or a token has no page.
    pub(crate) fn forward_paged(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        tokens: &PagedTokens,
        rotary: &RotaryEmbedding,
        pool: &PagePool,
    ) -> Result<Tensor> {
        let _span = tracing::trace_span!("attention").entered();
        let config = self.config();
        let (cos, sin) = rotary.tables();
        let style = rotary.style();
        let append = PagedAppend {
            heads: config.heads,
            tokens: TokenMap::Sequences(&tokens.owners),
            positions: &tokens.positions,
            rotation: Some(RotaryTables { cos, sin, style }),
            norms: self.head_norms(),
        };
        let (qkv, _) = self.projections();
        let qkv = qkv.forward_joint(x, norm)?.squeeze(0)?;
        let q = paged_append(&qkv, pool, &tokens.table, &append)?;
        let params = PagedAttention {
            scale: 1. / (config.head_dim as f32).sqrt(),
            window: config.window,
            ..Default::default()
        };
        let total = q.dim(0)?;
        let (mut parts, mut done) = (Vec::new(), 0);
        if let Some((count, table)) = &tokens.singles {
            done = *count;
            let q = q.narrow(0, 0, done)?.unsqueeze(1)?;
            parts.push(paged_attention(&q, pool, table, &params)?.squeeze(1)?);
        }
        if let Some((table, queries)) = &tokens.ragged {
            let q = q.narrow(0, done, total - done)?;
            parts.push(paged_prefill(&q, pool, table, queries, &params)?);
        }
        let y = Tensor::cat(&parts, 0)?.reshape((1, total, ()))?;
        self.project_back(&y, x)
    }
}
