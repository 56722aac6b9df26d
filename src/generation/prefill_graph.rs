//! Prompts of small models as CUDA graphs. Launching the kernels of a forward pass takes the host about a millisecond,
//! and a small model's kernels take less. So the pass over a prompt is recorded once for each number of rows, and
//! replayed.
//!
//! A prompt has the number of rows of its bucket: its last token is repeated to fill it. Attention is causal, so the
//! rows behind it change none of its own, and the keys and values that they leave are overwritten before a later token
//! can see them. The first prompt of a bucket is filled up too, so that a prompt gives the same bits whenever it is read.

use super::prefill::{Model, OP, Pass, launcher, lookup};
use crate::cuda::{Address, Graph, Launcher, Preceding, Scratch, profile};
use crate::models::decoder::{Block, Decoder};
use crate::nn::Projection;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice, Result, Tensor, bail};

/// Prompts that are not filled up: up to 8 rows of f32 keep 16 bits in quantized products.
const EXACT: usize = 8;

/// Rows of the buckets below [`STEP`]. From 64 rows on, INT8 weights take activations of 8 bits.
const FEW: [usize; 3] = [16, 32, 63];

/// Rows of all other buckets are multiples of this.
const STEP: usize = 64;

/// Rows times weights of a layer up to which the host takes longer to launch a layer's nine kernels than an H100 to run
/// them: some 40 us, in which it multiplies 512 rows by 16 million weights.
const HOST_BOUND: usize = 1 << 33;

/// Rows that are multiplied in the time in which weights are read.
const BALANCE: usize = 256;

/// The first GPUs of which that is known.
const HOPPER: u32 = 90;

/// Buckets that are remembered, those that were used last.
const MAX_BUCKETS: usize = 32;

/// Bytes that lie between the kernels of a recorded pass, at most. Most of it is for the library's products.
const MAX_BYTES: usize = 256 << 20;

/// What is known of the prompts that were read.
pub(super) struct PromptGraphs {
    /// In the order of their last use.
    known: Vec<Known>,
    /// What all recorded passes use, one after the other.
    memory: Option<Memory>,
    /// Whether graphs are wanted.
    wanted: bool,
}

/// A bucket of one sequence.
struct Known {
    index: usize,
    rows: usize,
    /// Bytes between the kernels.
    scratch: usize,
    state: State,
}

enum State {
    /// Read, and not recorded.
    Read,
    Recorded(Recorded),
    /// The driver does not record it, or memory is short.
    Refused,
}

/// The residual stream, and what lies between the kernels of a layer.
struct Memory {
    stream: Scratch,
    scratch: Scratch,
    bytes: [usize; 2],
}

/// A pass over a bucket's rows.
struct Recorded {
    graph: Graph,
    ids: CudaSlice<u32>,
    /// The residual stream, behind all layers.
    x: Address,
}

impl PromptGraphs {
    pub fn new(wanted: bool) -> Self {
        Self {
            known: Vec::new(),
            memory: None,
            wanted,
        }
    }

    /// Rows of the bucket of a prompt of so many tokens, which is read at once, if it has one: where the host takes longer
    /// to launch its kernels than the GPU to run them.
    pub fn bucket(&self, device: &CudaDevice, model: &Model<'_>, tokens: usize) -> Option<usize> {
        let gpu = launcher(device).ok()?.gpu;
        if !self.wanted || gpu.arch < HOPPER || tokens <= EXACT {
            return None;
        }
        let few = FEW.into_iter().find(|rows| tokens <= *rows);
        let rows = few.unwrap_or(tokens.next_multiple_of(STEP));
        let blocks = &model.decoder.stack.blocks;
        // The tables that frequencies for long contexts have are chosen by the true length.
        let same_tables = |block: &Block| {
            let tables = |end| model.rotaries.of(block).tables_up_to(end).0;
            std::ptr::eq(tables(tokens), tables(rows)) && rows <= tables(rows).dims()[0]
        };
        let has_room = model.caches.iter().all(|(k, _)| rows <= k.dims()[2]);
        let work = rows.max(BALANCE) * weights(blocks.first()?)?;
        (has_room && blocks.iter().all(same_tables) && work <= HOST_BOUND).then_some(rows)
    }

    /// Reads all of a prompt into the empty sequence `index`, and gives the logits f32 `[1, V]` after it.
    ///
    /// # Errors
    /// If a layer is not fused throughout, or memory is short.
    pub fn read(
        &mut self,
        device: &CudaDevice,
        model: &Model<'_>,
        (index, rows): (usize, usize),
        ids: &[u32],
    ) -> Result<Tensor> {
        let mut padded = ids.to_vec();
        padded.resize(rows, ids[ids.len() - 1]);
        let of_bucket = |known: &Known| (known.index, known.rows) == (index, rows);
        let found = self.known.iter().position(of_bucket);
        let Some(mut known) = found.map(|place| self.known.remove(place)) else {
            let (logits, scratch) = launched(device, model, &padded, ids.len())?;
            let state = State::Read;
            self.remember(Known {
                index,
                rows,
                scratch,
                state,
            });
            return Ok(logits);
        };
        // Kernels that are timed one by one are launched one by one.
        let is_timed = profile::is_capturing();
        if matches!(known.state, State::Read) && !is_timed {
            known.state = match self.record(device, model, rows, known.scratch) {
                Ok(recorded) => State::Recorded(recorded),
                Err(error) => {
                    tracing::warn!(
                        "reading prompts of {rows} tokens without a CUDA graph: {error}"
                    );
                    State::Refused
                }
            };
        }
        let logits = match &mut known.state {
            State::Recorded(recorded) if !is_timed => {
                recorded.read(device, model.decoder, &padded, ids.len())
            }
            _ => launched(device, model, &padded, ids.len()).map(|(logits, _)| logits),
        };
        self.remember(known);
        logits
    }

    fn remember(&mut self, known: Known) {
        if self.known.len() == MAX_BUCKETS {
            self.known.remove(0);
        }
        self.known.push(known);
    }

    fn record(
        &mut self,
        device: &CudaDevice,
        model: &Model<'_>,
        rows: usize,
        scratch: usize,
    ) -> Result<Recorded> {
        let ids = device.alloc_zeros::<u32>(rows)?;
        let at = [address_of(device, &ids), rows as u64];
        let lookup = lookup(model.decoder, at[0], rows)?;
        let stream = Scratch::room(lookup.dtype(), rows * lookup.width());
        let memory = self.memory(device, [stream, scratch])?;
        let mut x = 0;
        let graph = Graph::capture(launcher(device)?.gpu, |launcher| {
            let launcher = launcher.behind(Preceding::Other);
            memory.stream.reset();
            memory.scratch.reset();
            let (stream, scratch) = (&mut memory.stream, &mut memory.scratch);
            let mut pass = Pass::new(launcher, scratch, model.decoder, at, stream)?;
            pass.layers(model, 0)?;
            x = pass.x;
            Ok(())
        })?;
        Ok(Recorded { graph, ids, x })
    }

    /// Memory of at least so many bytes. Graphs that were recorded in less are forgotten.
    fn memory(&mut self, device: &CudaDevice, bytes: [usize; 2]) -> Result<&mut Memory> {
        let bytes = match &self.memory {
            Some(memory) => [0, 1].map(|i| memory.bytes[i].max(bytes[i])),
            None => bytes,
        };
        if bytes[1] > MAX_BYTES {
            bail!("{OP}: {} bytes between its kernels", bytes[1]);
        }
        if self.memory.as_ref().is_none_or(|m| m.bytes != bytes) {
            for known in &mut self.known {
                if let State::Recorded(_) = known.state {
                    known.state = State::Read;
                }
            }
            self.memory = None;
            let [stream, scratch] = bytes.map(|bytes| Scratch::fixed(OP, device, bytes));
            let (stream, scratch) = (stream?, scratch?);
            self.memory = Some(Memory {
                stream,
                scratch,
                bytes,
            });
        }
        match &mut self.memory {
            Some(memory) => Ok(memory),
            None => bail!("{OP}: no memory was taken"),
        }
    }
}

/// Weights of a layer.
fn weights(block: &Block) -> Option<usize> {
    let (qkv, output) = block.attention.projections();
    let (up, down) = block.mlp.projections();
    let of = |projection: &Projection| {
        let (weights, _) = projection.fused_parts()?;
        Some(weights.iter().map(|w| w.rows() * w.cols()).sum::<usize>())
    };
    [qkv, output, up, down].into_iter().map(of).sum()
}

/// The logits after row `last - 1` of these rows, launched kernel by kernel, and the bytes between the kernels.
fn launched(
    device: &CudaDevice,
    model: &Model<'_>,
    rows: &[u32],
    last: usize,
) -> Result<(Tensor, usize)> {
    let mut stream = Scratch::new(device);
    let ids = device.clone_htod(rows)?;
    let at = [address_of(device, &ids), rows.len() as u64];
    // The kernels that the graph will have.
    let launcher = Launcher {
        recorded: true,
        ..launcher(device)?
    };
    let mut scratch = Scratch::new(device);
    let mut pass = Pass::new(launcher, &mut scratch, model.decoder, at, &mut stream)?;
    pass.layers(model, 0)?;
    let x = pass.row(last - 1);
    let most = scratch.most();
    Ok((head(device, model.decoder, x)?, most))
}

/// The logits after a row of the residual stream.
fn head(device: &CudaDevice, decoder: &Decoder, x: Address) -> Result<Tensor> {
    // In order behind a graph, which is no kernel.
    let launcher = Launcher {
        dependent: false,
        ..launcher(device)?
    };
    let lookup = lookup(decoder, 0, 1)?;
    let mut scratch = Scratch::new(device);
    let mut pass = Pass::over(launcher, &mut scratch, &lookup, x);
    pass.logits(device, decoder, x, 1)
}

impl Recorded {
    fn read(
        &mut self,
        device: &CudaDevice,
        decoder: &Decoder,
        rows: &[u32],
        last: usize,
    ) -> Result<Tensor> {
        device.memcpy_htod(rows, &mut self.ids)?;
        let stream = launcher(device)?.stream;
        // SAFETY: what was recorded lies in `PromptGraphs::memory`, in the model, whose decoder the caller keeps as long as
        // this, and in the caches of the sequence. The memory is given up only with the graphs that use it.
        unsafe { self.graph.launch(stream)? };
        let lookup = lookup(decoder, 0, 1)?;
        let row = (last - 1) * lookup.width() * lookup.dtype().size_in_bytes();
        head(device, decoder, self.x + row as Address)
    }
}

fn address_of(device: &CudaDevice, ids: &CudaSlice<u32>) -> Address {
    ids.device_ptr(&device.cuda_stream()).0
}

#[cfg(test)]
mod tests {
    use super::super::prefill::Cache;
    use super::*;
    use crate::models::llama::{Llama, LlamaConfig};
    use crate::models::parts::Parts;
    use candle_core::{DType, Device, Error};
    use candle_nn::VarBuilder;

    fn model(gpu: &Device) -> Result<(Llama, Vec<Cache>)> {
        let root = env!("CARGO_MANIFEST_DIR");
        let folder = format!("{root}/tests/data/goldens/llama_gqa_tied");
        let config = std::fs::read_to_string(format!("{folder}/config.json"))?;
        let config: LlamaConfig = serde_json::from_str(&config).map_err(Error::wrap)?;
        let config = config.into_config(false);
        let weights = candle_core::safetensors::load(format!("{folder}/model.safetensors"), gpu)?;
        let model = Llama::load(VarBuilder::from_tensors(weights, DType::F32, gpu), &config)?;
        let dim = config.hidden_size / config.num_attention_heads;
        let shape = (1, config.num_key_value_heads, 64, dim);
        let zeros = || Tensor::zeros(shape, DType::F32, gpu);
        let caches = (0..config.num_hidden_layers).map(|_| Ok((zeros()?, zeros()?)));
        let caches = caches.collect::<Result<_>>()?;
        Ok((model, caches))
    }

    /// Prompts of three buckets in turns, of which each second one is recorded, and the larger ones make the others' be
    /// recorded anew: the same bits as of launched ones.
    #[test]
    fn cuda_prompts_that_are_read_again_are_replayed() -> Result<()> {
        let Ok(gpu) = Device::new_cuda(0) else {
            return Ok(());
        };
        let device = gpu.as_cuda_device()?;
        let (llama, caches) = model(&gpu)?;
        let mut kind = llama.empty_cache()?;
        let model = Model {
            decoder: llama.decoder(),
            rotaries: kind.rotaries(64)?,
            caches: &caches,
            end: 64,
        };
        let prompt = |len: u32| {
            (0..len)
                .map(|i| (i * i + 3 * i + len) % 96)
                .collect::<Vec<_>>()
        };
        let mut graphs = PromptGraphs::new(true);
        if launcher(device)?.gpu.arch < HOPPER {
            return Ok(());
        }
        for (tokens, rows) in [
            (8, None),
            (9, Some(16)),
            (17, Some(32)),
            (33, Some(63)),
            (64, Some(64)),
            (65, None),
        ] {
            assert_eq!(graphs.bucket(device, &model, tokens), rows, "{tokens}");
        }
        for round in 0..6 {
            for (len, rows) in [(18, 32), (30, 32), (40, 63), (12, 16)] {
                let ids = prompt(len);
                let (logits, _) = {
                    let mut padded = ids.clone();
                    padded.resize(rows, ids[ids.len() - 1]);
                    launched(device, &model, &padded, ids.len())?
                };
                let expected = logits.to_vec2::<f32>()?;
                let logits = graphs.read(device, &model, (0, rows), &ids)?;
                assert_eq!(logits.to_vec2::<f32>()?, expected, "round {round}, {len}");
            }
        }
        assert_eq!(graphs.known.len(), 3);
        let recorded = |known: &Known| matches!(known.state, State::Recorded(_));
        assert!(graphs.known.iter().all(recorded));
        Ok(())
    }
}
