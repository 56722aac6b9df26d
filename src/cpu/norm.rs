//! stub
use super::simd::Level; use crate::ops::Float;
pub fn rms_norm_rows<T: Float>(_l: Level, x:&[T], k: usize, w:&[T], eps:f32, out:&mut [f32]) {
  for (r,o) in x.chunks(k).zip(out.chunks_mut(k)) { let s: f32 = r.iter().map(|v| v.widen()*v.widen()).sum::<f32>()/k as f32; let i = 1./(s+eps).sqrt(); for ((o,v),w) in o.iter_mut().zip(r).zip(w) { *o = T::narrow(T::narrow(v.widen()*i).widen()*w.widen()).widen(); } }
}
