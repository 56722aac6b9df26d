//! Five ways of fusing the norm in front of a ternary product of one row (`ternary.cu`), on the four
//! projections of a SmolLM2-135M whose linear layers are BitNet's (each behind its norm): which is
//! fastest depends on the shape.
//!
//! Each form is checked against float64 before it is timed. A graph goes through 30 layers with
//! weights of their own, as a decoding step would; medians over graphs in turn, with the quartiles'
//! distance as spread.

use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaGraph, CudaModule, CudaSlice, CudaStream, DevicePtr, DeviceRepr,
    LaunchConfig, PushKernelArg, sys,
};
use candle_core::cuda_backend::cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use candle_core::{Device, Error, Result, bail};
use common::distance::Distance;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;

/// Name, rows and columns.
const SHAPES: [(&str, usize, usize); 4] = [
    ("QKV", 1728, 576),
    ("O", 576, 576),
    ("up", 1536, 576),
    ("down", 576, 1536),
];

const LAYERS: usize = 30;

/// Times through all layers in a graph, and graphs of each form.
const LAPS: usize = 4;
const ROUNDS: usize = 25;

const EPS: f64 = 1e-5;

/// Rows of a block of the naive form.
const NAIVE_ROWS: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// A kernel for the norm and one for the product.
    Apart,
    /// The normalised row in shared memory, sums by atomics.
    Naive,
    /// The same row, private sums and shuffles.
    Private,
    /// The norm on the way, its factor behind the product.
    Streaming,
}

/// How a projection is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    form: Form,
    /// Lanes that share a row of weights; the naive form has none.
    lanes: usize,
    /// Of a block.
    threads: usize,
}

/// The forms as they are commonly written: a warp for each row.
const PLAIN: [(&str, Plan); 4] = [
    ("apart", Plan::new(Form::Apart, 32, 128)),
    ("naive: atomics", Plan::new(Form::Naive, 32, 256)),
    ("private, shuffles", Plan::new(Form::Private, 32, 128)),
    ("streaming", Plan::new(Form::Streaming, 32, 128)),
];

impl Plan {
    const fn new(form: Form, lanes: usize, threads: usize) -> Self {
        Self {
            form,
            lanes,
            threads,
        }
    }

    /// The plan for a shape, from the sweep on an H100: a warp for each row always, and so many warps to
    /// a block that all blocks run at once, since each of them normalises the row for itself. Streaming
    /// saves the barriers, which is worth as much where rows are many and short; where they are
    /// long, reading x and the norm's weight in every warp costs more.
    fn adaptive(rows: usize, sms: usize) -> Self {
        let threads = if rows.div_ceil(8) <= sms { 256 } else { 512 };
        Self::new(Form::Private, 32, threads)
    }

    /// All that the sweep tries.
    fn all() -> impl Iterator<Item = Self> {
        [Form::Private, Form::Streaming]
            .into_iter()
            .flat_map(|form| {
                [4, 8, 16, 32].into_iter().flat_map(move |lanes| {
                    [32, 64, 128, 256, 512].map(|threads| Self::new(form, lanes, threads))
                })
            })
    }

    fn name(&self) -> String {
        let form = format!("{:?}", self.form).to_lowercase();
        format!("{form}, {} lanes, {} threads", self.lanes, self.threads)
    }
}

/// `Params` of the kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    x: u64,
    weight: u64,
    codes: u64,
    scales: u64,
    y: u64,
    normed: u64,
    rows: i32,
}

// SAFETY: the layout is that of the kernels' parameter, plain numbers throughout.
unsafe impl DeviceRepr for Params {}

/// Reports the table, and the sweep, where they are wanted and there is a GPU.
pub fn report(wants_study: bool, wants_sweep: bool) -> Result<()> {
    if !wants_study && !wants_sweep {
        return Ok(());
    }
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let stream = device.as_cuda_device()?.cuda_stream();
    let projections = SHAPES
        .iter()
        .map(|(name, rows, k)| Projection::new(name, *rows, *k, &stream))
        .collect::<Result<Vec<_>>>()?;
    if wants_study {
        study(&projections, &stream)?;
    }
    if wants_sweep {
        for projection in &projections {
            sweep(projection, &stream)?;
        }
    }
    Ok(())
}

/// The table: microseconds of a projection, and of all four in all layers one after the other.
fn study(projections: &[Projection], stream: &Arc<CudaStream>) -> Result<()> {
    println!("\nternary study, one row: us of a projection, and of {LAYERS} layers of all four");
    print!("{:<20}", "");
    for p in projections {
        print!("{:>18}", format!("{} {}x{}", p.name, p.rows, p.k));
    }
    println!("{:>18}{:>18}", "layer", "model");
    let mut runs: Vec<_> = PLAIN
        .iter()
        .map(|(name, plan)| (*name, projections.iter().map(|_| *plan).collect::<Vec<_>>()))
        .collect();
    let sms = stream
        .context()
        .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        .map_err(Error::wrap)?;
    let adaptive = projections
        .iter()
        .map(|p| Plan::adaptive(p.rows, sms as usize));
    runs.push(("adaptive", adaptive.collect()));
    let mut columns = Vec::new();
    for (i, projection) in projections.iter().enumerate() {
        let plans: Vec<_> = runs.iter().map(|(_, plans)| plans[i]).collect();
        columns.push(projection.times(&plans, stream)?);
    }
    let graphs = runs.iter().map(|(_, plans)| {
        let steps: Vec<_> = projections.iter().zip(plans.iter().copied()).collect();
        graph(stream, &steps)
    });
    let model = medians(&graphs.collect::<Result<Vec<_>>>()?, stream)?;
    for (i, (name, _)) in runs.iter().enumerate() {
        print!("{name:<20}");
        let mut layer = 0.;
        for column in &columns {
            let (time, spread) = column[i];
            layer += time;
            print!("{:>18}", format!("{time:.2} +-{spread:.2}"));
        }
        let (time, spread) = model[i];
        let all = LAYERS as f64 * 4.;
        let model = format!("{:.1} +-{:.1}", all * time, all * spread);
        println!("{:>18}{model:>18}", format!("{layer:.2}"));
    }
    for (i, (projection, column)) in projections.iter().zip(&columns).enumerate() {
        let best = column.iter().map(|(t, _)| *t).fold(f64::MAX, f64::min);
        let (_, adaptive) = &runs[runs.len() - 1];
        println!(
            "{:<20}{:.3} of the fastest time by {}",
            projection.name,
            column[runs.len() - 1].0 / best,
            adaptive[i].name()
        );
    }
    Ok(())
}

/// All plans for a projection, fastest first.
fn sweep(projection: &Projection, stream: &Arc<CudaStream>) -> Result<()> {
    let plans: Vec<_> = Plan::all().collect();
    let times = projection.times(&plans, stream)?;
    let mut rows: Vec<_> = plans.iter().zip(times).collect();
    rows.sort_by(|a, b| a.1.0.total_cmp(&b.1.0));
    println!(
        "\nternary sweep, {} {}x{}",
        projection.name, projection.rows, projection.k
    );
    for (plan, (time, spread)) in rows {
        println!("{:<44}{time:>9.2} us +-{spread:.2}", plan.name());
    }
    Ok(())
}

/// A projection of every layer on the GPU.
struct Projection {
    name: &'static str,
    rows: usize,
    k: usize,
    module: Arc<CudaModule>,
    codes: Vec<CudaSlice<u8>>,
    x: CudaSlice<f32>,
    weight: CudaSlice<f32>,
    scales: CudaSlice<f32>,
    y: CudaSlice<f32>,
    normed: CudaSlice<f32>,
    /// Of each layer.
    expected: Vec<Vec<f64>>,
}

impl Projection {
    fn new(name: &'static str, rows: usize, k: usize, stream: &Arc<CudaStream>) -> Result<Self> {
        let (major, minor) = stream.context().compute_capability().map_err(Error::wrap)?;
        let options = CompileOptions {
            options: vec![
                format!("--gpu-architecture=compute_{major}{minor}"),
                format!("-DK={k}"),
                "--std=c++17".into(),
            ],
            ..Default::default()
        };
        let ptx =
            compile_ptx_with_opts(include_str!("ternary.cu"), options).map_err(Error::wrap)?;
        let module = stream.context().load_module(ptx).map_err(Error::wrap)?;
        let mut rng = StdRng::seed_from_u64(rows as u64);
        let mut floats = |n: usize, middle: f32| -> Vec<f32> {
            (0..n)
                .map(|_| middle + rng.random_range(-1f32..1.))
                .collect()
        };
        let (x, weight, scales) = (floats(k, 0.), floats(k, 1.5), floats(rows, 1.5));
        let put = |v: &[f32]| stream.clone_htod(v).map_err(Error::wrap);
        let mut projection = Self {
            name,
            rows,
            k,
            module,
            codes: Vec::new(),
            x: put(&x)?,
            weight: put(&weight)?,
            scales: put(&scales)?,
            y: stream.alloc_zeros(rows).map_err(Error::wrap)?,
            normed: stream.alloc_zeros(k + 4).map_err(Error::wrap)?,
            expected: Vec::new(),
        };
        for _ in 0..LAYERS {
            let codes: Vec<u8> = (0..rows * k).map(|_| rng.random_range(0..3)).collect();
            projection
                .expected
                .push(reference(&x, &weight, &scales, &codes));
            let bytes: Vec<u8> = codes
                .chunks_exact(4)
                .map(|c| c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6)
                .collect();
            projection
                .codes
                .push(stream.clone_htod(&bytes).map_err(Error::wrap)?);
        }
        Ok(projection)
    }

    fn params(&self, layer: usize, stream: &CudaStream) -> Params {
        let float = |v: &CudaSlice<f32>| v.device_ptr(stream).0;
        Params {
            x: float(&self.x),
            weight: float(&self.weight),
            codes: self.codes[layer].device_ptr(stream).0,
            scales: float(&self.scales),
            y: float(&self.y),
            normed: float(&self.normed),
            rows: self.rows as i32,
        }
    }

    fn function(&self, name: &str) -> Result<CudaFunction> {
        self.module.load_function(name).map_err(Error::wrap)
    }

    /// The plan's kernels with their blocks and threads.
    fn kernels(&self, plan: Plan) -> Result<Vec<(CudaFunction, usize, usize)>> {
        let Plan {
            form,
            lanes,
            threads,
        } = plan;
        let blocks = (self.rows * lanes).div_ceil(threads);
        let of = |name: &str| self.function(&format!("{name}_{lanes}"));
        Ok(match form {
            Form::Apart => vec![
                (self.function("rms_norm")?, 1, 256),
                (of("matmul")?, blocks, threads),
            ],
            Form::Naive => vec![(
                self.function("naive")?,
                self.rows.div_ceil(NAIVE_ROWS),
                threads,
            )],
            Form::Private => vec![(of("private")?, blocks, threads)],
            Form::Streaming => vec![(of("streaming")?, blocks, threads)],
        })
    }

    /// Fails if a plan's result is wrong in one of the first layers.
    fn check(&self, plan: Plan, stream: &Arc<CudaStream>) -> Result<()> {
        let kernels = self.kernels(plan)?;
        for (layer, expected) in self.expected.iter().enumerate().take(3) {
            launch(stream, &kernels, self.params(layer, stream))?;
            let got = stream.clone_dtoh(&self.y).map_err(Error::wrap)?;
            let Distance { largest, top, .. } = Distance::of(&got, expected)?;
            if largest > 1e-5 * top {
                let plan = plan.name();
                bail!(
                    "ternary {}, {plan}: {largest} away from values up to {top}",
                    self.name
                );
            }
        }
        Ok(())
    }

    /// Microseconds of a layer and their spread for each plan, checked before.
    fn times(&self, plans: &[Plan], stream: &Arc<CudaStream>) -> Result<Vec<(f64, f64)>> {
        let mut graphs = Vec::new();
        for plan in plans {
            self.check(*plan, stream)?;
            graphs.push(graph(stream, &[(self, *plan)])?);
        }
        medians(&graphs, stream)
    }
}

/// `rms_norm(x) W^T` in float64.
fn reference(x: &[f32], weight: &[f32], scales: &[f32], codes: &[u8]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|v| f64::from(*v).powi(2)).sum();
    let factor = 1. / (squares / x.len() as f64 + EPS).sqrt();
    let normed: Vec<_> = x
        .iter()
        .zip(weight)
        .map(|(x, w)| f64::from(*x) * f64::from(*w) * factor)
        .collect();
    let row = |codes: &[u8]| -> f64 {
        let products = codes.iter().zip(&normed);
        products.map(|(c, v)| (f64::from(*c) - 1.) * v).sum()
    };
    codes
        .chunks_exact(x.len())
        .zip(scales)
        .map(|(codes, scale)| f64::from(*scale) * row(codes))
        .collect()
}

fn launch(
    stream: &Arc<CudaStream>,
    kernels: &[(CudaFunction, usize, usize)],
    params: Params,
) -> Result<()> {
    for (function, blocks, threads) in kernels {
        let config = LaunchConfig {
            grid_dim: (*blocks as u32, 1, 1),
            block_dim: (*threads as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the kernels take `Params`, whose addresses the projection owns.
        unsafe { stream.launch_builder(function).arg(&params).launch(config) }
            .map_err(Error::wrap)?;
    }
    Ok(())
}

/// All steps of a layer, layer after layer, a few times; and how many steps that is.
fn graph(stream: &Arc<CudaStream>, steps: &[(&Projection, Plan)]) -> Result<(CudaGraph, usize)> {
    let mut launches = Vec::new();
    for layer in (0..LAYERS).cycle().take(LAPS * LAYERS) {
        for (projection, plan) in steps {
            launches.push((projection.kernels(*plan)?, projection.params(layer, stream)));
        }
    }
    stream.synchronize().map_err(Error::wrap)?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).map_err(Error::wrap)?;
    let captured = launches
        .iter()
        .try_for_each(|(kernels, params)| launch(stream, kernels, *params));
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).map_err(Error::wrap)?;
    captured?;
    match graph {
        Some(graph) => Ok((graph, launches.len())),
        None => bail!("ternary: nothing was captured"),
    }
}

/// Microseconds of a step of each graph, the median over rounds in which all take a turn, and the
/// distance of the quartiles.
fn medians(graphs: &[(CudaGraph, usize)], stream: &Arc<CudaStream>) -> Result<Vec<(f64, f64)>> {
    let mut times = vec![Vec::new(); graphs.len()];
    let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    for round in 0..=ROUNDS {
        for ((graph, steps), times) in graphs.iter().zip(&mut times) {
            let begin = stream.record_event(timed).map_err(Error::wrap)?;
            graph.launch().map_err(Error::wrap)?;
            let end = stream.record_event(timed).map_err(Error::wrap)?;
            let ms = begin.elapsed_ms(&end).map_err(Error::wrap)?;
            // The first round warms up.
            if round > 0 {
                times.push(f64::from(ms) * 1e3 / *steps as f64);
            }
        }
    }
    Ok(times
        .into_iter()
        .map(|mut t| {
            t.sort_by(f64::total_cmp);
            (t[t.len() / 2], t[3 * t.len() / 4] - t[t.len() / 4])
        })
        .collect())
}
