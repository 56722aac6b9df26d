//! The op as candle calls it.

use super::attention::Attention;
use super::cpu;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape};

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        self.form.op
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let four = |layout| self.four(layout);
        let (q_layout, k_layout, v_layout) = (four(q_layout)?, four(k_layout)?, four(v_layout)?);
        let out = cpu::forward(self, (q, &q_layout), (k, &k_layout), (v, &v_layout))?;
        Ok((out, self.shape(&q_layout)?))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let four = |layout| self.four(layout);
        let (q_layout, k_layout, v_layout) = (four(q_layout)?, four(k_layout)?, four(v_layout)?);
        let out = super::cuda::forward(self, (q, &q_layout), (k, &k_layout), (v, &v_layout))?;
        Ok((out, self.shape(&q_layout)?))
    }
}
