//! The devices that tests run on, and random tensors that are the same in every run.

use crate::common::distance::Distance;
use candle_core::{DType, Device, Result, Tensor};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::cell::RefCell;

/// The CPU, and the first GPU where CUDA is built in and one is there.
///
/// # Panics
/// If there is no GPU although `CANDLE_FUSED_REQUIRE_CUDA=1` asks for one.
pub fn devices() -> Vec<Device> {
    let gpu = gpu();
    let required = std::env::var("CANDLE_FUSED_REQUIRE_CUDA").is_ok_and(|v| v == "1");
    assert!(
        gpu.is_some() || !required,
        "CANDLE_FUSED_REQUIRE_CUDA=1, but no CUDA device opens"
    );
    [Device::Cpu].into_iter().chain(gpu).collect()
}

#[cfg(not(feature = "cuda"))]
fn gpu() -> Option<Device> {
    None
}

/// One device for each test's thread: candle's stream is the thread's own, and tensors of two
/// handles on one GPU count as on different devices.
#[cfg(feature = "cuda")]
fn gpu() -> Option<Device> {
    lent::GPU.with(lent::Lent::device)
}

/// Devices that threads lend one another, so that none is dropped while the tests run: candle destroys its handle of
/// cuBLAS with it, which waits for the whole context, and driver 580.159.04 reads a null pointer now and then where
/// another thread records a CUDA graph at that time.
#[cfg(feature = "cuda")]
mod lent {
    use candle_core::Device;
    use std::sync::Mutex;

    static FREE: Mutex<Vec<Device>> = Mutex::new(Vec::new());

    thread_local! {
        pub static GPU: Lent = Lent::new();
    }

    /// A device, as long as the thread runs.
    pub struct Lent(Option<Device>);

    impl Lent {
        fn new() -> Self {
            let free = FREE.lock().expect("no panic holds it").pop();
            Self(free.or_else(|| Device::new_cuda(0).ok()))
        }

        pub fn device(&self) -> Option<Device> {
            self.0.clone()
        }
    }

    impl Drop for Lent {
        fn drop(&mut self) {
            let Some(device) = self.0.take() else {
                return;
            };
            // The next thread has a stream of its own. The first wait may only tell of what an earlier drop has left.
            let _ = device.synchronize();
            match device.synchronize() {
                Ok(()) => FREE.lock().expect("no panic holds it").push(device),
                Err(_) => std::mem::forget(device),
            }
        }
    }
}

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// The device that the test body runs for, see [`on_every_device`].
pub fn device() -> Device {
    DEVICE.with_borrow(Clone::clone)
}

/// Runs a test body once for each device; it asks [`device`] for the one in hand.
pub fn on_every_device(body: impl Fn() -> Result<()>) -> Result<()> {
    for device in devices() {
        DEVICE.set(device);
        body()?;
    }
    Ok(())
}

/// Runs something for one device.
pub fn on<T>(device: &Device, body: impl FnOnce() -> T) -> T {
    DEVICE.set(device.clone());
    body()
}

thread_local! {
    /// Every test runs on a thread of its own, so each draws the same numbers whatever runs beside.
    static RNG: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(299_792_458));
}

/// Standard normal values.
pub fn randn(dims: &[usize], dtype: DType) -> Result<Tensor> {
    let values: Vec<f32> =
        RNG.with_borrow_mut(|rng| (0..dims.iter().product()).map(|_| normal(rng)).collect());
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
}

/// [`randn`] on a device: the same values on each.
pub fn randn_on(dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    randn(dims, dtype)?.to_device(device)
}

/// Box and Muller's transform.
fn normal(rng: &mut StdRng) -> f32 {
    use rand::Rng;
    let radius = (-2. * (1. - rng.random::<f64>()).ln()).sqrt();
    (radius * (2. * std::f64::consts::PI * rng.random::<f64>()).cos()) as f32
}

/// The elements in row-major order, widened, wherever they are.
pub fn values(t: &Tensor) -> Result<Vec<f64>> {
    t.to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1()
}

/// `max |got - expected| / max |expected|` over row-major elements; an error if one of them is not
/// finite.
pub fn widest_error(got: &Tensor, expected: &[f64]) -> Result<f64> {
    Ok(Distance::of(&values(got)?, expected)?.relative())
}

/// Views of every kind that candle hands over: cut on the left and right, transposed, permuted,
/// broadcast, of one row and one column.
pub fn layouts_on(dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
    let randn = |dims: &[usize], dtype| randn_on(dims, dtype, device);
    let base = randn(&[6, 4, 43], dtype)?;
    Ok(vec![
        base.narrow(2, 1, 41)?,
        base.narrow(0, 2, 3)?.narrow(1, 1, 2)?,
        base.transpose(0, 1)?,
        base.transpose(1, 2)?,
        base.permute((2, 0, 1))?,
        randn(&[40, 5], dtype)?.t()?,
        randn(&[1, 40], dtype)?.broadcast_as((7, 40))?,
        randn(&[7, 1], dtype)?.broadcast_as((7, 40))?,
        base.narrow(2, 5, 1)?,
        base.narrow(0, 0, 1)?.narrow(1, 3, 1)?,
    ])
}

/// The compute capability of a GPU times ten.
#[cfg(feature = "cuda")]
pub fn architecture(device: &Device) -> Result<i32> {
    use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum as attribute;
    let stream = device.as_cuda_device()?.cuda_stream();
    let get = |which| {
        let value = stream.context().attribute(which);
        value.map_err(candle_core::Error::wrap)
    };
    let major = get(attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = get(attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(10 * major + minor)
}
