//! Self-attention of many sequences whose keys and values are in pages.

use super::{Attention, Norm, RotaryEmbedding};
use crate::ops::{
    PagePool, PageTable, PagedAppend, PagedAttention, RaggedQueries, RotaryTables, TokenMap,
    paged_append, paged_attention, paged_prefill,
};
use candle_core::{Device, Result, Tensor};

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

/// Tokens of one sequence, one behind the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PagedRun<'a> {
    /// The sequence's pages, those of these tokens among them.
    pub pages: &'a [u32],
    /// The position of the first.
    pub first: usize,
    pub tokens: usize,
}

impl PagedTokens {
    /// The tokens of all `runs`, of which the first `singles` have one.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(runs: &[PagedRun<'_>], singles: usize, device: &Device) -> Result<Self> {
        let width = runs.iter().map(|run| run.pages.len()).max().unwrap_or(0);
        // What stands behind the last page is not read.
        let padded = runs.iter().flat_map(|run| {
            let behind = std::iter::repeat_n(u32::MAX, width - run.pages.len());
            run.pages.iter().copied().chain(behind)
        });
        let block_table = Tensor::from_vec(padded.collect(), (runs.len(), width), device)?;
        let lengths = runs.iter().map(|run| (run.first + run.tokens) as u32);
        let lengths = Tensor::from_vec(lengths.collect(), runs.len(), device)?;
        let part = |from: usize, count: usize| -> Result<Option<PageTable>> {
            if count == 0 {
                return Ok(None);
            }
            Ok(Some(PageTable::Padded {
                block_table: block_table.narrow(0, from, count)?,
                lengths: lengths.narrow(0, from, count)?,
            }))
        };
        let single_table = part(0, singles)?.map(|table| (singles, table));
        let ragged = match part(singles, runs.len() - singles)? {
            Some(table) => {
                let (mut ends, mut longest) = (vec![0], 0);
                for run in &runs[singles..] {
                    ends.push(ends[ends.len() - 1] + run.tokens as u32);
                    longest = longest.max(run.tokens);
                }
                let queries = RaggedQueries {
                    cu_seqlens_q: Tensor::new(ends, device)?,
                    max_seqlen_q: longest,
                };
                Some((table, queries))
            }
            None => None,
        };
        let places = runs
            .iter()
            .flat_map(|run| run.first..run.first + run.tokens);
        let positions: Vec<u32> = places.map(|position| position as u32).collect();
        let owners = runs.iter().enumerate();
        let owners = owners.flat_map(|(b, run)| std::iter::repeat_n(b as u32, run.tokens));
        Ok(Self {
            owners: Tensor::new(owners.collect::<Vec<_>>(), device)?,
            positions: Tensor::new(positions, device)?,
            table: PageTable::Padded {
                block_table,
                lengths,
            },
            singles: single_table,
            ragged,
        })
    }
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
