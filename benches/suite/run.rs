//! One run: everything that is wanted, one after the other.

use crate::args::{Args, Section};
use crate::budget::Budget;
use crate::cases::{Extent, Grid, KernelCase};
use crate::export::Export;
use crate::figures::{Limits, count_bounds, count_floors};
use crate::machine::Machine;
use crate::nvml::{Clocks, Nvml};
use crate::place::Place;
use crate::{
    baseline, cases, goals, layers, limits, markdown, models, ops, plots, scaling, serving, threads,
};
use anyhow::{Result, anyhow, ensure};
use candle_core::Device;
use clap::ValueEnum;
use common::shapes::Shape;
use common::{gpu, report};
use std::process::ExitCode;

/// Measures or reads, shows, writes and compares.
pub fn run(args: &Args) -> Result<ExitCode> {
    if args.list {
        return list(args);
    }
    let earlier = args.baseline.as_deref().map(Export::read).transpose()?;
    let export = match args.from.is_empty() {
        false => Export::join(&args.from)?,
        true => measure(args)?,
    };
    goals::show(&export);
    if let Some(path) = &args.export {
        export.write(path)?;
    }
    if let Some(folder) = &args.plots {
        plots::write(&export, folder)?;
    }
    if let Some(path) = &args.markdown {
        markdown::write(&export, path)?;
    }
    if let Some(earlier) = earlier {
        let slower = baseline::compare(&earlier, &export, args.fail_on_regression.unwrap_or(5.));
        if args.fail_on_regression.is_some() && slower > 0 {
            return Ok(ExitCode::FAILURE);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The names of the cases.
fn list(args: &Args) -> Result<ExitCode> {
    let place = Place::new(device(args)?, args.quick)?;
    let mut names = String::new();
    let extent = Extent::of(args.quick);
    if args.times_kernels() {
        let wanted = kernel_cases(args)?.into_iter().map(|case| case.name());
        let wanted = wanted.filter(|name| args.wants(name));
        names.extend(wanted.map(|name| name + "\n"));
    }
    let mut cases = Vec::new();
    if args.has(Section::Ops) {
        cases.extend(cases::all(&place, extent)?);
    }
    if args.has(Section::Sweep) {
        cases.extend(cases::sweep(&place, extent));
    }
    for case in cases {
        if args.wants(&case.name()) {
            names += &format!("{}\n", case.name());
        }
    }
    if args.has(Section::Serving) {
        let serving = serving::names(&place, args).into_iter();
        names.extend(serving.map(|name| name + "\n"));
    }
    report::write_text(&mut std::io::stdout().lock(), &names)?;
    Ok(ExitCode::SUCCESS)
}

/// What --kernel, --tune and --cliffs time.
fn kernel_cases(args: &Args) -> Result<Vec<KernelCase>> {
    let shape = |name: &String| {
        Shape::from_str(name, true).map_err(|_| anyhow!("--models: {name} is no named shape"))
    };
    let extent = Extent::of(args.quick);
    let grid = Grid {
        shapes: match args.cliffs && args.shapes.is_empty() {
            true => cases::rows_of_large(extent),
            false => args.shapes.iter().map(|s| (s.m, s.n, s.k)).collect(),
        },
        formats: &args.formats,
        dtypes: &args.dtypes,
        models: args.models.iter().map(shape).collect::<Result<_>>()?,
        extent,
    };
    Ok(grid.cases()?)
}

fn device(args: &Args) -> Result<Device> {
    Ok(match !args.cpu && gpu::is_present() {
        true => Device::new_cuda(0)?,
        false => Device::Cpu,
    })
}

fn measure(args: &Args) -> Result<Export> {
    if let Some(threads) = args.most_threads() {
        candle_fused::cpu::pool::set_threads(threads);
    }
    let device = device(args)?;
    ensure!(
        device.is_cuda() || !args.times_kernels(),
        "--kernel, --tune and --cliffs time CUDA kernels: they need a GPU, and `cargo bench --features cuda`"
    );
    if args.has(Section::Threads) {
        threads::check(&device, args)?;
    }
    let nvml = device.is_cuda().then(Nvml::open).flatten();
    let place = Place::new(device, args.quick)?;
    let budget = Budget::new(args.budget);
    let mut clocks: Vec<Clocks> = Vec::new();
    let mut log = |at: &str| clocks.extend(nvml.as_ref().and_then(|nvml| nvml.clocks(at)));
    let machine = Machine::of(&place.device, nvml.as_ref());
    println!("{}", machine.describe());
    let limits = limits::measure(&place, args.quick)?;
    log("limits");
    show(&limits);
    let mut export = Export::new(machine, limits);
    #[cfg(feature = "cuda")]
    if args.times_kernels() {
        let run = if args.cliffs {
            crate::cliffs::run
        } else {
            crate::tune::run
        };
        export.tune = run(&place, kernel_cases(args)?, args, &budget)?;
        log("kernels");
    }
    if args.has(Section::Threads) {
        export.threads = threads::run(args, &budget)?;
        log("threads");
    }
    if args.has(Section::Models) {
        export.models = models::run(&place, args, &budget)?;
        log("models");
    }
    if args.has(Section::Layers) {
        export.layers = layers::run(&place, args, &export.models, &budget)?;
        log("layers");
    }
    if args.has(Section::Scaling) {
        export.scaling = scaling::run(&place, args, &export.layers, &budget)?;
        log("scaling");
    }
    if args.has(Section::Ops) {
        let cases = cases::all(&place, Extent::of(args.quick))?;
        (export.ops, export.skipped) = ops::run(&place, cases, &export.limits, args, &budget)?;
        log("ops");
    }
    if args.has(Section::Sweep) {
        let cases = cases::sweep(&place, Extent::of(args.quick));
        let (runs, skipped) = ops::run(&place, cases, &export.limits, args, &budget)?;
        export.sweep = runs;
        export.skipped.extend(skipped);
        log("sweep");
    }
    if args.has(Section::Serving) {
        (export.serving, export.prefixes) = serving::run(&place, args, &export.limits, &budget)?;
        log("serving");
    }
    export.limits = limits::measure(&place, args.quick)?.better(&export.limits);
    show(&export.limits);
    count_floors(&mut export.ops, &export.limits);
    count_floors(&mut export.sweep, &export.limits);
    count_bounds(&mut export.serving, &export.limits);
    #[cfg(feature = "cuda")]
    crate::ternary::report(args.has(Section::Ternary), args.has(Section::TernarySweep))?;
    export.clocks = clocks;
    for c in &export.clocks {
        println!("{}", c.describe());
    }
    Ok(export)
}

fn show(limits: &Limits) {
    let gemm: Vec<_> = limits
        .gemm
        .iter()
        .map(|(dtype, flops)| format!("{dtype} {:.0} GFLOP/s", flops * 1e-9))
        .collect();
    println!(
        "limits: copy {:.1} GB/s, read {:.1} GB/s, product {}, an op without work {:.2} us",
        limits.copy * 1e-9,
        limits.read * 1e-9,
        gemm.join(", "),
        limits.dispatch * 1e6
    );
}
