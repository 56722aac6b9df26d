//! Sequences of different lengths, one after the other without padding, or each padded to as many rows.

use super::check::Form;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Where the sequences of a ragged batch begin and end.
///
/// Sequence `b` has rows `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` of q and rows `cu_seqlens_k[b] ..
/// cu_seqlens_k[b + 1]` of k and v. Both tensors are `[sequences + 1]`, u32, on q's device.
#[derive(Clone, Debug)]
pub struct RaggedBatch {
    /// Cumulative numbers of queries, usually from 0 to `total_q`.
    pub cu_seqlens_q: Tensor,
    /// Cumulative numbers of keys.
    pub cu_seqlens_k: Tensor,
    /// At least as many queries as the longest sequence has. On a GPU, which alone reads the lengths
    /// there, what a sequence has beyond it is not computed.
    pub max_seqlen_q: usize,
}

/// How long the sequences of a batch are.
#[derive(Clone, Debug)]
pub(crate) enum Lengths {
    /// One after the other.
    Cumulative(RaggedBatch),
    /// `[sequences]`, contiguous: of queries and of keys, each in `pitch` rows.
    Padded { lengths: Tensor, pitch: usize },
}

impl Lengths {
    #[cfg(feature = "cuda")]
    pub(super) fn sequences(&self) -> usize {
        match self {
            Self::Cumulative(batch) => batch.cu_seqlens_q.dims()[0] - 1,
            Self::Padded { lengths, .. } => lengths.dims()[0],
        }
    }

    /// Queries of a sequence at most.
    #[cfg(feature = "cuda")]
    pub(super) fn longest(&self) -> usize {
        match self {
            Self::Cumulative(batch) => batch.max_seqlen_q,
            Self::Padded { pitch, .. } => *pitch,
        }
    }

    /// The rows of each sequence, read from the tensors.
    ///
    /// # Errors
    /// If lengths are no such rows.
    pub(super) fn ranges(&self, op: &str, total_q: usize, total_k: usize) -> Result<Vec<Rows>> {
        match self {
            Self::Cumulative(batch) => batch.ranges(op, total_q, total_k),
            Self::Padded { lengths, pitch } => {
                let lengths = lengths.to_vec1::<u32>()?;
                let rows = lengths.into_iter().enumerate().map(|(b, n)| {
                    let n = n as usize;
                    if n > *pitch {
                        bail!("{op}: lengths[{b}] is {n}, q has {pitch} tokens of each sequence");
                    }
                    let first = b * pitch;
                    Ok(Rows {
                        first_query: first,
                        queries: n,
                        first_key: first,
                        keys: n,
                    })
                });
                rows.collect()
            }
        }
    }
}

/// Cumulative lengths on the host.
///
/// # Errors
/// If they decrease.
pub(crate) fn cumulative_lengths(op: &str, name: &str, lengths: &Tensor) -> Result<Vec<u32>> {
    let lengths = lengths.to_vec1::<u32>()?;
    if let Some(b) = (1..lengths.len()).find(|b| lengths[*b] < lengths[b - 1]) {
        let (from, to) = (lengths[b - 1], lengths[b]);
        bail!("{op}: {name} decreases from {from} to {to} at {b}");
    }
    Ok(lengths)
}

/// A sequence's rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub first_query: usize,
    pub queries: usize,
    pub first_key: usize,
    pub keys: usize,
}

impl RaggedBatch {
    /// Contiguous, as the kernels read it.
    pub(super) fn checked(&self, form: &Form, device: &Device) -> Result<Self> {
        let op = form.op;
        for (name, lengths) in self.named() {
            if lengths.rank() != 1 || lengths.dims()[0] < 2 {
                let dims = lengths.dims();
                bail!(
                    "{op}: {name} is {dims:?}, expected [sequences + 1], of one sequence or more"
                );
            }
            if lengths.dtype() != DType::U32 {
                bail!("{op}: {name} is {:?}, expected u32", lengths.dtype());
            }
            form.check_device(name, lengths, device)?;
        }
        let (q, k) = (self.cu_seqlens_q.dims(), self.cu_seqlens_k.dims());
        if q != k {
            bail!("{op}: cu_seqlens_k is {k:?}, expected cu_seqlens_q's {q:?}");
        }
        Ok(Self {
            cu_seqlens_q: self.cu_seqlens_q.contiguous()?,
            cu_seqlens_k: self.cu_seqlens_k.contiguous()?,
            max_seqlen_q: self.max_seqlen_q,
        })
    }

    fn named(&self) -> [(&'static str, &Tensor); 2] {
        [
            ("cu_seqlens_q", &self.cu_seqlens_q),
            ("cu_seqlens_k", &self.cu_seqlens_k),
        ]
    }

    /// The rows of each sequence, read from the tensors.
    ///
    /// # Errors
    /// If lengths decrease, reach past the rows that there are, or pass `max_seqlen_q`.
    pub(crate) fn ranges(&self, op: &str, total_q: usize, total_k: usize) -> Result<Vec<Rows>> {
        let [q, k] = self
            .named()
            .map(|(name, lengths)| cumulative_lengths(op, name, lengths));
        let (q, k) = (q?, k?);
        for (name, lengths, rows, total) in [
            ("cu_seqlens_q", &q, "q", total_q),
            ("cu_seqlens_k", &k, "k", total_k),
        ] {
            if let Some(end) = lengths.last().filter(|end| **end as usize > total) {
                bail!("{op}: {name} ends at {end}, but {rows} has {total} tokens");
            }
        }
        let most = self.max_seqlen_q;
        q.windows(2)
            .zip(k.windows(2))
            .enumerate()
            .map(|(b, (q, k))| {
                let queries = (q[1] - q[0]) as usize;
                if queries > most {
                    bail!("{op}: sequence {b} has {queries} queries, max_seqlen_q is {most}");
                }
                Ok(Rows {
                    first_query: q[0] as usize,
                    queries,
                    first_key: k[0] as usize,
                    keys: (k[1] - k[0]) as usize,
                })
            })
            .collect()
    }
}
