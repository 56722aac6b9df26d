//! Activations of a gate, times what it gates.

use super::{gelu_erf_v, gelu_tanh_v, relu2_v, silu_v};
use crate::cpu::simd::Level;
use crate::cpu::vector::{Kernel, Vector, dispatch};

/// Applies `$f` to a gate and multiplies it by what it gates, likewise.
macro_rules! gated {
    ($(#[$doc:meta])* $name:ident, $f:ident) => {
        $(#[$doc])*
        ///
        /// # Panics
        /// If the slices differ in length.
        pub fn $name(level: Level, gate: &mut [f32], up: &[f32]) {
            struct Gated<'a>(&'a mut [f32], &'a [f32]);
            impl Kernel for Gated<'_> {
                type Output = ();
                #[inline(always)]
                unsafe fn run<V: Vector>(self) {
                    let mut gates = self.0.chunks_exact_mut(V::LANES);
                    let mut ups = self.1.chunks_exact(V::LANES);
                    for (gate, up) in (&mut gates).zip(&mut ups) {
                        // SAFETY: both chunks have `LANES` elements.
                        unsafe {
                            let y = $f(V::load(gate.as_ptr())).mul(V::load(up.as_ptr()));
                            y.store(gate.as_mut_ptr());
                        }
                    }
                    let (gate, up) = (gates.into_remainder(), ups.remainder());
                    if !gate.is_empty() {
                        let mut pad = [0.0f32; 16];
                        pad[..gate.len()].copy_from_slice(gate);
                        // SAFETY: no vector has more than 16 lanes.
                        unsafe { $f(V::load(pad.as_ptr())).store(pad.as_mut_ptr()) }
                        for ((g, s), u) in gate.iter_mut().zip(pad).zip(up) {
                            *g = s * u;
                        }
                    }
                }
            }
            assert_eq!(gate.len(), up.len(), "gate and up differ in length");
            // SAFETY: the kernel holds slices.
            unsafe { dispatch(level, Gated(gate, up)) }
        }
    };
}

gated!(
    /// `gate[i] = silu(gate[i]) * up[i]`
    swiglu,
    silu_v
);
gated!(
    /// `gate[i] = gelu(gate[i]) * up[i]`, with [`gelu_erf`](super::gelu_erf)
    geglu,
    gelu_erf_v
);
gated!(
    /// `gate[i] = gelu(gate[i]) * up[i]`, with [`gelu_tanh`](super::gelu_tanh)
    geglu_tanh,
    gelu_tanh_v
);
gated!(
    /// `gate[i] = max(gate[i], 0)^2 * up[i]`
    relu2_glu,
    relu2_v
);

#[cfg(test)]
mod tests {
    use super::super::{gelu_erf, gelu_tanh, relu2, silu};
    use super::*;

    #[test]
    fn gates_are_what_they_are_alone_times_up() {
        type Gated = fn(Level, &mut [f32], &[f32]);
        type Alone = fn(Level, &mut [f32]);
        let forms: [(Gated, Alone); 4] = [
            (swiglu, silu),
            (geglu, gelu_erf),
            (geglu_tanh, gelu_tanh),
            (relu2_glu, relu2),
        ];
        for level in Level::available() {
            for len in [0, 1, 7, 8, 31, 100] {
                for (gated, activate) in forms {
                    let gate: Vec<f32> = (0..len).map(|i| i as f32 * 0.37 - 9.0).collect();
                    let up: Vec<f32> = (0..len).map(|i| 3.0 - i as f32 * 0.11).collect();
                    let (mut fused, mut apart) = (gate.clone(), gate);
                    gated(level, &mut fused, &up);
                    activate(level, &mut apart);
                    apart.iter_mut().zip(&up).for_each(|(a, u)| *a *= u);
                    assert_eq!(fused, apart);
                }
            }
        }
    }
}
