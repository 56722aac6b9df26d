//! Taking turns: how long calls take on the CPU, and between events on a GPU.

use crate::cases::Contender;
use crate::place::Place;
use crate::stats::Times;
use candle_core::Result;
#[cfg(feature = "cuda")]
use common::report;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds at least, unless a round takes longer than `most`.
    pub rounds: usize,
    /// What a contender's calls of a round take together at least.
    pub round: Duration,
    /// After how long no further round begins.
    pub most: Duration,
}

impl Effort {
    /// For tables, or for a first look.
    pub fn of(place: &Place, quick: bool) -> Self {
        let millis = Duration::from_millis;
        let (round, most) = match (place.device.is_cuda(), quick) {
            (true, false) => (1, 250),
            (true, true) => (1, 60),
            (false, false) => (10, 400),
            (false, true) => (6, 120),
        };
        Self {
            rounds: if quick { 3 } else { 7 },
            round: millis(round),
            most: millis(most),
        }
    }
}

/// What a contender took.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Of a call: on the CPU by the clock, on a GPU between events with all calls queued before.
    pub times: Times,
    /// What the host needs to queue a call, on a GPU.
    pub host: Option<f64>,
    /// Of a call in a graph of many, with dependent launches where they are ours.
    pub graph: Option<Times>,
}

/// What a contender took in each round.
#[derive(Clone, Default)]
struct Rounds {
    device: Vec<f64>,
    host: Vec<f64>,
    graph: Vec<f64>,
}

#[cfg(feature = "cuda")]
use cuda::Recorded as Graph;

/// Only a GPU has graphs.
#[cfg(not(feature = "cuda"))]
enum Graph {}

/// Calls of one round at most; on a GPU they are queued before the first begins.
const MOST_CALLS: usize = 64;

/// Times the contenders in rounds in which each takes a turn.
pub fn race(place: &Place, contenders: &[Contender], effort: Effort) -> Result<Vec<Taken>> {
    let clock = Clock::new(place)?;
    let mut calls = Vec::new();
    for contender in contenders {
        calls.push(clock.calls(contender, effort)?);
    }
    let graph = |contender: &Contender| contender.in_graph.then(|| clock.graph(contender))?;
    let mut graphs: Vec<_> = contenders.iter().map(graph).collect();
    let mut times = vec![Rounds::default(); contenders.len()];
    let started = Instant::now();
    for round in 0.. {
        if round >= effort.rounds || (round > 0 && started.elapsed() > effort.most) {
            break;
        }
        let sides = contenders.iter().zip(&calls).zip(&mut graphs);
        for (((contender, calls), graph), times) in sides.zip(&mut times) {
            let (device, host) = clock.time(contender, *calls)?;
            times.device.push(device);
            times.host.push(host);
            if let Some(graph) = graph {
                times.graph.push(clock.replay(graph)?);
            }
        }
    }
    Ok(times
        .iter()
        .map(|rounds| Taken {
            times: Times::of(&rounds.device),
            host: place
                .device
                .is_cuda()
                .then(|| Times::of(&rounds.host).median),
            graph: (!rounds.graph.is_empty()).then(|| Times::of(&rounds.graph)),
        })
        .collect())
}

/// How a device's time is read.
struct Clock<'a> {
    place: &'a Place,
    #[cfg(feature = "cuda")]
    events: Option<cuda::Events<'a>>,
}

impl<'a> Clock<'a> {
    fn new(place: &'a Place) -> Result<Self> {
        Ok(Self {
            place,
            #[cfg(feature = "cuda")]
            events: cuda::Events::of(&place.device)?,
        })
    }

    /// Calls that fill a round; finding that out warms the contender up.
    fn calls(&self, contender: &Contender, effort: Effort) -> Result<usize> {
        let (first, _) = self.time(contender, 1)?;
        if first > effort.most.as_secs_f64() {
            return Ok(1);
        }
        let (seconds, _) = self.time(contender, 2)?;
        let fill = (effort.round.as_secs_f64() / seconds.max(1e-9)).ceil() as usize;
        let most = if self.place.device.is_cuda() {
            MOST_CALLS
        } else {
            usize::MAX
        };
        Ok(fill.clamp(1, most))
    }

    /// The contender's calls as a graph, where they can be recorded.
    #[cfg(feature = "cuda")]
    fn graph(&self, contender: &Contender) -> Option<Graph> {
        match self.events.as_ref()?.record(contender) {
            Ok(graph) => graph,
            Err(error) => {
                let name = &contender.name;
                report::say(format_args!("{name} is not timed in a graph: {error}"));
                None
            }
        }
    }

    /// Only a GPU has graphs.
    #[cfg(not(feature = "cuda"))]
    fn graph(&self, _: &Contender) -> Option<Graph> {
        None
    }

    /// Seconds of a call in a graph.
    #[cfg(feature = "cuda")]
    fn replay(&self, graph: &mut Graph) -> Result<f64> {
        match &self.events {
            Some(events) => events.replay(graph),
            None => candle_core::bail!("a graph without a GPU"),
        }
    }

    /// There is no graph.
    #[cfg(not(feature = "cuda"))]
    fn replay(&self, graph: &mut Graph) -> Result<f64> {
        match *graph {}
    }

    /// Seconds of a call, and of the host for it.
    fn time(&self, contender: &Contender, calls: usize) -> Result<(f64, f64)> {
        #[cfg(feature = "cuda")]
        if let Some(events) = &self.events {
            return events.time(contender, calls);
        }
        let started = Instant::now();
        for turn in 0..calls {
            black_box((contender.call)(turn)?);
        }
        let seconds = started.elapsed().as_secs_f64() / calls as f64;
        Ok((seconds, seconds))
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use crate::cases::Contender;
    use candle_core::cuda_backend::cudarc::driver::CudaEvent;
    use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
    use candle_core::{CudaDevice, DType, Device, Error, Result, Tensor};
    use candle_fused::cuda::Replay;
    use std::cell::Cell;
    use std::time::Instant;

    /// Calls of a graph.
    const RECORDED: usize = 32;

    /// Calls of a contender as one graph.
    pub struct Recorded(Replay<Vec<Vec<Tensor>>>);

    /// Seconds of a pass over what keeps the GPU busy, on the fastest GPUs.
    const PASS: f64 = 100e-6;

    pub struct Events<'a> {
        device: &'a CudaDevice,
        busy: Tensor,
        /// What the host needed for a call when last seen.
        host: Cell<f64>,
    }

    impl<'a> Events<'a> {
        /// None on the CPU.
        pub fn of(on: &'a Device) -> Result<Option<Self>> {
            let Device::Cuda(device) = on else {
                return Ok(None);
            };
            Ok(Some(Self {
                device,
                busy: Tensor::zeros(128 << 20, DType::BF16, on)?,
                host: Cell::new(200e-6),
            }))
        }

        fn mark(&self) -> Result<CudaEvent> {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            let stream = self.device.cuda_stream();
            stream.record_event(flags).map_err(Error::wrap)
        }

        fn keep_busy(&self, passes: usize) -> Result<()> {
            for _ in 0..passes.clamp(2, 400) {
                self.busy.affine(1., 0.)?;
            }
            Ok(())
        }

        /// Calls in turn as a graph, with the right results; none where a part of them would not be
        /// in it.
        pub fn record(&self, contender: &Contender) -> Result<Option<Recorded>> {
            (contender.call)(0)?;
            let all = || (0..RECORDED).map(&contender.call).collect::<Result<_>>();
            // SAFETY: the benchmark uses the GPU from one thread.
            let mut recorded = Recorded(unsafe { Replay::record(self.device, all)? });
            let kernels = recorded.0.kernels();
            // Some products have a kernel in front that prepares the rows, or one behind that sums up.
            if kernels == 0 || !kernels.is_multiple_of(RECORDED) {
                return Ok(None);
            }
            self.replay(&mut recorded)?;
            for results in recorded.0.results() {
                for (result, expected) in results.iter().zip(&contender.expected) {
                    expected.check(&contender.name, result)?;
                }
            }
            Ok(Some(recorded))
        }

        /// Seconds of a call in a graph.
        pub fn replay(&self, recorded: &mut Recorded) -> Result<f64> {
            self.keep_busy(2)?;
            let begin = self.mark()?;
            // SAFETY: the contender holds what its calls read, and outlives their graph; the end is
            // waited for below.
            unsafe { recorded.0.launch()? };
            let end = self.mark()?;
            let milliseconds = begin.elapsed_ms(&end).map_err(Error::wrap)?;
            Ok(f64::from(milliseconds) * 1e-3 / RECORDED as f64)
        }

        /// Seconds of a call on the GPU, which is kept busy until all of them are queued, and of the
        /// host to queue it.
        pub fn time(&self, contender: &Contender, calls: usize) -> Result<(f64, f64)> {
            self.device
                .cuda_stream()
                .synchronize()
                .map_err(Error::wrap)?;
            let passes = (1.5 * self.host.get() * calls as f64 / PASS).ceil() as usize;
            self.keep_busy(passes)?;
            let begin = self.mark()?;
            let started = Instant::now();
            for turn in 0..calls {
                (contender.call)(turn)?;
            }
            let host = started.elapsed().as_secs_f64() / calls as f64;
            let end = self.mark()?;
            self.host.set(host);
            let milliseconds = begin.elapsed_ms(&end).map_err(Error::wrap)?;
            Ok((f64::from(milliseconds) * 1e-3 / calls as f64, host))
        }
    }
}
