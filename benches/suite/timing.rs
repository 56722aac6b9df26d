//! Taking turns: how long calls take on the CPU, and between events on a GPU.

use crate::cases::Contender;
use crate::place::Place;
use crate::stats::Times;
use candle_core::Result;
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
}

/// Calls of one round at most; on a GPU they are queued before the first begins.
const MOST_CALLS: usize = 64;

/// Times the contenders in rounds in which each takes a turn.
pub fn race(place: &Place, contenders: &[Contender], effort: Effort) -> Result<Vec<Taken>> {
    let clock = Clock::new(place)?;
    let mut calls = Vec::new();
    for contender in contenders {
        calls.push(clock.calls(contender, effort)?);
    }
    let mut times = vec![(Vec::new(), Vec::new()); contenders.len()];
    let started = Instant::now();
    for round in 0.. {
        if round >= effort.rounds || (round > 0 && started.elapsed() > effort.most) {
            break;
        }
        for ((contender, calls), times) in contenders.iter().zip(&calls).zip(&mut times) {
            let (device, host) = clock.time(contender, *calls)?;
            times.0.push(device);
            times.1.push(host);
        }
    }
    Ok(times
        .iter()
        .map(|(device, host)| Taken {
            times: Times::of(device),
            host: place.device.is_cuda().then(|| Times::of(host).median),
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
    use std::cell::Cell;
    use std::time::Instant;

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

        /// Seconds of a call on the GPU, which is kept busy until all of them are queued, and of the
        /// host to queue it.
        pub fn time(&self, contender: &Contender, calls: usize) -> Result<(f64, f64)> {
            self.device
                .cuda_stream()
                .synchronize()
                .map_err(Error::wrap)?;
            let passes = (1.5 * self.host.get() * calls as f64 / PASS).ceil() as usize;
            for _ in 0..passes.clamp(2, 400) {
                self.busy.affine(1., 0.)?;
            }
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
