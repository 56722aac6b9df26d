//! How the blocks of `gemm_wna16_sm90` share a product: by the time that a model of the kernel gives.

use crate::cuda::abi::{
    GEMM_WNA16 as FORMS, GEMM_WNA16_CHANNELS as CHANNELS, GEMM_WNA16_SMALL_TOKENS as SMALL,
    GEMM_WNA16_STAGED_TOKENS as STAGED_TOKENS, GEMM_WNA16_SUMS_TOKENS as SUMS_TOKENS,
    GemmWna16Form, K_BLOCK as BLOCK_K, WARP,
};
use crate::cuda::{GpuSpec, Grid};

/// Of a block, that multiply.
const WARPS: usize = 8;

/// How blocks share a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    /// The kernel's place among those of a format.
    pub form: usize,
    /// Blocks of a cluster, which share K.
    pub split_k: usize,
    n_tiles: usize,
    pub m_tiles: usize,
    k_blocks: usize,
    /// Whether a multiprocessor has one block, where two would fit.
    alone: bool,
    /// Whether clusters have equal shares of the blocks of K of all tiles, and not whole tiles.
    pub stream_k: bool,
}

/// What a GPU takes, in microseconds: for a block of K where a multiprocessor has one block, where it has two, and for
/// the rest of a tile. The first two are those of an H100, the next two of an H200, by INT4 and Q4_0; the last two, and
/// what follows, were fitted to 90 tilings on an H200. A block of K of the last form takes 1.36 in INT4, 1.45 in Q4_K and
/// FP8 and 1.52 in Q8_0: 1.42 stands for all.
const TIMES: [[f64; 3]; 7] = [
    [0.62, 1.15, 3.],
    [0.65, 1.2, 3.],
    [0.7, 1.3, 3.],
    [0.85, 1.6, 4.],
    [0.97, 0., 4.4],
    [1.2, 0., 7.],
    [1.42, 0., 10.4],
];

/// For each further tile of a persistent block, for sums that it leaves for another or adds, and for those of more than
/// 64 tokens that go through a cluster.
const BETWEEN: f64 = 0.25;
const LEFT: f64 = 3.4;
const EXCHANGED: f64 = 3.1;

/// Blocks of K of a cluster's share, at least: fewer are not worth what the sums' way through memory takes.
const SHARE: usize = 8;

/// Clusters of 1 to 8 blocks, each alone on its multiprocessor, that an H100 of 132 has room for: they lie within
/// groups of 16 or 18 multiprocessors.
const CLUSTERS: [usize; 8] = [132, 66, 39, 30, 22, 17, 15, 15];

/// How many clusters of this many blocks a GPU has room for.
pub(super) fn clusters(gpu: &GpuSpec, blocks: usize) -> usize {
    (CLUSTERS[blocks - 1] * gpu.sms as usize / CLUSTERS[0]).max(1)
}

impl Tiling {
    /// That with the shortest time for so many output channels (or gated pairs of them), rows of operand B and
    /// blocks of K.
    pub fn of(gpu: &GpuSpec, [channels, rows, k_blocks]: [usize; 3]) -> Self {
        let whole = |form| Self::whole(form, [channels, rows, k_blocks]);
        let mut best = (f64::INFINITY, whole(0));
        for (form, GemmWna16Form { tokens, .. }) in FORMS.iter().enumerate() {
            let whole = whole(form);
            for split_k in 1..=CLUSTERS.len().min(k_blocks) {
                let mut tiling = Self { split_k, ..whole };
                tiling.alone =
                    *tokens > SMALL || whole.n_tiles * whole.m_tiles <= clusters(gpu, split_k);
                for stream_k in [false, true] {
                    let tiling = Self { stream_k, ..tiling };
                    if stream_k && !tiling.is_persistent() {
                        continue;
                    }
                    let time = tiling.time(gpu);
                    if time < best.0 {
                        best = (time, tiling);
                    }
                }
            }
        }
        best.1
    }

    fn whole(form: usize, [channels, rows, k_blocks]: [usize; 3]) -> Self {
        Self {
            form,
            split_k: 1,
            n_tiles: channels.div_ceil(CHANNELS),
            m_tiles: rows.div_ceil(FORMS[form].tokens),
            k_blocks,
            alone: false,
            stream_k: false,
        }
    }

    /// Microseconds.
    fn time(&self, gpu: &GpuSpec) -> f64 {
        let [one, two, rest] = TIMES[self.form];
        if self.stream_k {
            let share = (self.tiles() * self.k_blocks).div_ceil(self.clusters(gpu));
            let further = share.div_ceil(self.k_blocks) - 1;
            // A tile of more than two clusters has sums that are left at the very end.
            let left = if share < self.k_blocks { 2. } else { 1. };
            return share as f64 * one + further as f64 * BETWEEN + rest + left * LEFT;
        }
        let once = clusters(gpu, self.split_k);
        let (once, each) = match self.alone {
            true => (once, one),
            false => (2 * once, two),
        };
        let rounds = (self.n_tiles * self.m_tiles).div_ceil(once);
        let again = match self.is_persistent() {
            true => BETWEEN,
            false => rest,
        };
        let exchanged = match self.split_k > 1 && FORMS[self.form].tokens > SMALL {
            true => EXCHANGED,
            false => 0.,
        };
        exchanged
            + (rounds * self.k_blocks.div_ceil(self.split_k)) as f64 * each
            + (rounds - 1) as f64 * again
            + rest
    }

    /// Dynamic shared memory: stages of x with their sums, or f32 sums of the tile, from a multiple of 1,024 on.
    pub fn shared(&self, gpu: &GpuSpec) -> usize {
        let GemmWna16Form { tokens, stages } = FORMS[self.form];
        let x_sums = if tokens <= SUMS_TOKENS {
            16 * tokens
        } else {
            0
        };
        let x = stages * (tokens * 2 * BLOCK_K + x_sums);
        let sums = |tokens| tokens * (CHANNELS + 4) * 4;
        let needed = 1024
            + match self.is_persistent() {
                true => x + sums(STAGED_TOKENS),
                false => x.max(sums(tokens)),
            };
        match self.alone && tokens <= SMALL {
            true => needed.max(gpu.share(2)),
            false => needed,
        }
    }

    /// Tiles of the output, or pairs of them for the blocks that share x, in the order in which clusters take them.
    pub fn tiles(&self) -> usize {
        self.n_tiles.div_ceil(self.sharing()) * self.m_tiles
    }

    /// Blocks of a cluster that share x.
    pub fn sharing(&self) -> usize {
        if self.is_persistent() && self.n_tiles > 1 {
            2
        } else {
            1
        }
    }

    /// Whether a block takes one tile after the other.
    fn is_persistent(&self) -> bool {
        FORMS[self.form].tokens > SMALL && self.split_k == 1
    }

    fn clusters(&self, gpu: &GpuSpec) -> usize {
        let room = clusters(gpu, self.split_k.max(self.sharing()));
        match (self.is_persistent(), self.stream_k) {
            (false, _) => self.tiles(),
            (true, false) => self.tiles().min(room),
            (true, true) => (self.tiles() * self.k_blocks / SHARE).clamp(1, room),
        }
    }

    pub fn grid(&self, gpu: &GpuSpec) -> Grid {
        // Where there are many tokens a warpgroup more brings x.
        let warps = match FORMS[self.form].tokens > SMALL {
            true => WARPS + 4,
            false => WARPS,
        };
        let cluster = self.split_k.max(self.sharing());
        let mut grid = Grid::new(
            [(self.clusters(gpu) * cluster) as u32, 1, 1],
            (warps * WARP) as u32,
            self.shared(gpu) as u32,
        );
        grid.cluster = cluster as u32;
        grid
    }

    /// What each cluster of a grid has, and how many have one more: blocks of K, or tiles.
    pub fn shares(&self, grid: &Grid) -> (usize, usize) {
        let clusters = (grid.blocks[0] / grid.cluster) as usize;
        let all = match self.stream_k {
            true => self.tiles() * self.k_blocks,
            false => self.tiles(),
        };
        (all / clusters, all % clusters)
    }

    /// Of stream-K, for a grid of so many blocks: f32 sums that wait in memory, and flags.
    pub fn partial_sums(&self, blocks: usize) -> (usize, usize) {
        let sums = CHANNELS * FORMS[self.form].tokens;
        match self.stream_k {
            true => (blocks * sums, blocks * WARPS),
            false => (0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FORMS, GpuSpec, Tiling};

    #[test]
    fn tiles_fill_an_h100() {
        let gpu = GpuSpec {
            capability: 90,
            arch: 90,
            sms: 132,
            shared: 227 << 10,
        };
        // Channels, rows and K, and tokens of a tile, blocks that share K and whether it is stream-K: the best of those
        // measured.
        for ((channels, rows, k), expected) in [
            ((14336, 8, 4096usize), (8, 2, false)),
            ((4096, 8, 14336), (8, 6, false)),
            ((14336, 16, 4096), (16, 2, false)),
            ((14336, 64, 4096), (64, 2, false)),
            ((28672, 64, 4096), (64, 1, false)),
            ((14336, 128, 4096), (128, 1, false)),
            ((14336, 256, 4096), (256, 1, false)),
            ((14336, 512, 4096), (256, 1, true)),
            ((6144, 512, 4096), (256, 1, true)),
            ((4096, 512, 14336), (256, 2, false)),
            ((4096, 128, 14336), (128, 1, true)),
            ((4096, 256, 4096), (128, 2, false)),
            ((4096, 1024, 4096), (256, 1, false)),
            ((128, 8, 32), (8, 1, false)),
            // What `clusters_have_shares_of_all_tiles` of the suite multiplies.
            ((4344, 512, 2048), (128, 1, true)),
            ((4344, 450, 2048), (128, 1, true)),
        ] {
            let tiling = Tiling::of(&gpu, [channels, rows, k.div_ceil(128)]);
            let got = (FORMS[tiling.form].tokens, tiling.split_k, tiling.stream_k);
            assert_eq!(got, expected, "{channels} x {rows} x {k}");
            assert!(tiling.shared(&gpu) <= gpu.shared as usize);
        }
    }
}
