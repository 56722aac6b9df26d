//! What the benchmarks make of their measurements.

#[path = "../../benches/suite/stats.rs"]
mod stats;

use stats::{PowerLaw, Times};

#[test]
fn a_power_law_is_found_again() {
    let points: Vec<_> = [1., 2., 5., 64.].map(|x: f64| (x, 3. * x.powf(0.7))).into();
    let law = PowerLaw::fit(&points).expect("four sizes");
    assert!((law.exponent - 0.7).abs() < 1e-9, "{law:?}");
    assert!((law.factor - 3.).abs() < 1e-9, "{law:?}");
    assert!((law.r2 - 1.).abs() < 1e-9, "{law:?}");
}

#[test]
fn what_scatters_is_explained_in_part() {
    let points = [(1., 1.), (2., 4.), (4., 3.), (8., 9.)];
    let law = PowerLaw::fit(&points).expect("four sizes");
    assert!(law.exponent > 0.5 && law.exponent < 1.5, "{law:?}");
    assert!(law.r2 > 0.5 && law.r2 < 1., "{law:?}");
}

#[test]
fn one_size_has_no_law() {
    assert_eq!(PowerLaw::fit(&[]), None);
    assert_eq!(PowerLaw::fit(&[(8., 1.)]), None);
    assert_eq!(PowerLaw::fit(&[(8., 1.), (8., 2.)]), None);
    assert_eq!(PowerLaw::fit(&[(0., 1.), (8., 2.)]), None);
}

#[test]
fn times_are_told_by_their_middle() {
    let times = Times::of(&[4., 1., 2., 3., 100.]);
    assert_eq!((times.median, times.best, times.rounds), (3., 1., 5));
    assert_eq!(times.spread, 2.);
    assert!((times.noise() - 2. / 3.).abs() < 1e-12);
}
