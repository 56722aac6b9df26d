//! The op, and its launch on the CPU.

use super::AttentionParams;
use crate::cpu::attention::{AnyView, Output, Rule, Sizes, View, attend};
use crate::cpu::simd::Level;
use crate::cpu::vector::Element;
use crate::ops::view::dispatch_float;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Storage, Tensor, WithDType, bail};

/// The op, with its checked parameters.
pub(super) struct FlashAttention<'a> {
    pub params: &'a AttentionParams,
    /// In f32, broadcast to `[B, Hq, Tq, Tk]`.
    pub mask: Option<Tensor>,
    pub level: Level,
}

fn view<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
    name: &str,
) -> Result<View<'a, T>> {
    let dims = <[usize; 4]>::try_from(layout.dims());
    let strides = <[usize; 4]>::try_from(layout.stride());
    let (Ok(dims), Ok(strides)) = (dims, strides) else {
        bail!(
            "flash_attention: {name} is {:?}, expected four dimensions",
            layout.dims()
        );
    };
    match View::new(
        storage.as_slice::<T>()?,
        layout.start_offset(),
        dims,
        strides,
    ) {
        Some(view) => Ok(view),
        None => bail!("flash_attention: the layout of {name} reaches past its storage"),
    }
}

fn any_view<'a>(storage: &'a CpuStorage, layout: &Layout, name: &str) -> Result<AnyView<'a>> {
    Ok(match storage {
        CpuStorage::F32(_) => AnyView::F32(view(storage, layout, name)?),
        CpuStorage::F16(_) => AnyView::F16(view(storage, layout, name)?),
        CpuStorage::BF16(_) => AnyView::Bf16(view(storage, layout, name)?),
        other => bail!(
            "flash_attention: {name} is {:?}, expected f32, f16 or bf16",
            other.dtype()
        ),
    })
}

impl FlashAttention<'_> {
    fn attend<T: Element + WithDType>(
        &self,
        sizes: Sizes,
        q: (&CpuStorage, &Layout),
        k: (&CpuStorage, &Layout),
        v: (&CpuStorage, &Layout),
    ) -> Result<CpuStorage> {
        let mask = self.mask.as_ref().map(|m| m.storage_and_layout());
        let mask = match &mask {
            None => None,
            Some((storage, layout)) => match &**storage {
                Storage::Cpu(storage) => Some(view::<f32>(storage, layout, "mask")?),
                _ => bail!("flash_attention: mask is not on the CPU"),
            },
        };
        let rule = Rule {
            scale: self.params.scale,
            causal: self.params.causal,
            window: self.params.window,
            softcap: self.params.softcap,
            mask,
        };
        let (q_view, k, v) = (
            any_view(q.0, q.1, "q")?,
            view::<T>(k.0, k.1, "k")?,
            view(v.0, v.1, "v")?,
        );
        let len = sizes.batch * sizes.queries * sizes.heads * sizes.dim;
        macro_rules! into {
            ($variant:ident, $output:ident) => {{
                let mut out = Vec::with_capacity(len);
                let room = Output::$output(&mut out.spare_capacity_mut()[..len]);
                attend(self.level, sizes, rule, q_view, k, v, room);
                // SAFETY: `attend` has written every element.
                unsafe { out.set_len(len) }
                CpuStorage::$variant(out)
            }};
        }
        Ok(match q_view {
            AnyView::F32(_) => into!(F32, F32),
            AnyView::F16(_) => into!(F16, F16),
            AnyView::Bf16(_) => into!(BF16, Bf16),
        })
    }
}

impl CustomOp3 for FlashAttention<'_> {
    fn name(&self) -> &'static str {
        "flash_attention"
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
        let (batch, heads, queries, dim) = q_layout.shape().dims4()?;
        let (_, kv_heads, keys, _) = k_layout.shape().dims4()?;
        let sizes = Sizes {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            dim,
        };
        crate::trace::record("flash_attention", || {
            let step = if sizes.few_rows() {
                "decode"
            } else {
                "prefill"
            };
            let (q, kv) = (q.dtype().as_str(), k.dtype().as_str());
            format!("cpu {} {step} q {q} kv {kv}", self.level.name())
        });
        let out = dispatch_float!(k.dtype(), self.name(), "k", T => {
            self.attend::<T>(sizes, (q, q_layout), (k, k_layout), (v, v_layout))?
        });
        Ok((out, Shape::from((batch, queries, heads, dim))))
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
        let (q, k, v) = ((q, q_layout), (k, k_layout), (v, v_layout));
        super::cuda::forward(self.params, self.mask.as_ref(), q, k, v)
    }
}
