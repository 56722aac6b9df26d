use candle_core::quantized::{GgmlDType, QTensor}; use candle_core::{Device, Tensor};
use candle_fused::cpu::packed::*; use candle_fused::cpu::simd; use std::time::Instant;
fn main(){
  let a:Vec<String>=std::env::args().collect();
  let level=simd::level();
  
  for d in [GgmlDType::Q4_0,GgmlDType::Q4_1,GgmlDType::Q5_0,GgmlDType::Q5_1,GgmlDType::Q8_0,GgmlDType::Q4K,GgmlDType::Q5K,GgmlDType::Q6K]{
    if a.len()>1 && format!("{d:?}")!=a[1] {continue}
    for (rows,cols,m) in [(16,512,1),(192,512,1),(512,512,1),(16,512,2),(16,512,4),(128,512,4),(128,512,32),(512,512,256)]{
      let w=Tensor::randn(0f32,1.0,(rows,cols),&Device::Cpu).unwrap();
      let w=QTensor::quantize(&w,d).unwrap();
      let p=PackedMatrix::pack(d,rows,cols,&w.data().unwrap()).unwrap();
      let x=Tensor::randn(0f32,1.0,(m,cols),&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
      let q=Q8Activations::quantize(level,&x,m,cols).unwrap();
      let mut out=vec![0f32;m*rows];
      let macs=(m*rows*cols) as f64; let n=(1.5e7/macs).ceil().max(3.0) as usize;
      let mut v=vec![];
      for _ in 0..121{ let s=Instant::now(); for _ in 0..n/3+1{p.matmul(level,0..rows,&q,0..m,&mut out,rows).unwrap();} let e=s.elapsed().as_secs_f64()/(n/3+1) as f64; v.push(e*3.24);}
      v.sort_by(f64::total_cmp); let best=v[3]; print!("{d:?} {rows}x{cols} m{m}: {:.1} cyc/256MAC {:.0} GMAC/s | ", best*1e9/macs*256.0, macs/best*3.24/1e9);
    }
    println!();
  }
}
