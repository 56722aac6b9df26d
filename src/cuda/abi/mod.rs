//! What Rust and CUDA share: the structs that kernels take, and the constants that both sides go by.
//!
//! The rooms are written once, in the language of `abi!`. Here they become Rust. The build script reads
//! the same files with a macro of its own (`header.rs`) and writes `abi/<room>.cuh`, which the kernels
//! include: the same structs and constants in C++, where `static_assert` holds size and offsets to those
//! that Rust gives. `layout` holds the structs of this crate to the same numbers.
//!
//! * `Const<T>`, `Mut<T>`: an address on the GPU here, `const T*` and `T*` in the kernels
//! * `Count<T>`: the type of a constant that is a usize here and a `T` in the kernels
//! * `table`: a list of compiled forms; in the kernels the macro `FUSED_<NAME>(X)`, which calls `X` on each row

use super::Address;

/// What an address points to, which only the kernels know.
pub(crate) trait Shared {
    type Address;
    type Count;
}

impl<T> Shared for T {
    type Address = Address;
    type Count = usize;
}

pub(crate) type Const<T> = <T as Shared>::Address;
pub(crate) type Mut<T> = <T as Shared>::Address;
pub(crate) type Count<T> = <T as Shared>::Count;

/// `void`
pub(crate) enum Void {}
/// `char`
pub(crate) enum Char {}
/// `float2`
pub(crate) enum Float2 {}
/// `float4`
pub(crate) enum Float4 {}
/// `unsigned long long`, which atomics take
pub(crate) enum LongLong {}

macro_rules! abi {
    () => {};
    (
        $(#[doc = $doc:literal])*
        $(#[derive($($derive:ident),+)])?
        struct $name:ident $(align($align:literal))? {
            $($(#[doc = $field_doc:literal])* $field:ident: $type:ty,)+
        }
        $($rest:tt)*
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug $(, $($derive),+)?)]
        #[repr(C $(, align($align))?)]
        pub(crate) struct $name {
            $($(#[doc = $field_doc])* pub $field: $type,)+
        }
        abi! { $($rest)* }
    };
    (
        $(#[doc = $doc:literal])*
        const $name:ident: $type:ty = $value:expr;
        $($rest:tt)*
    ) => {
        $(#[doc = $doc])*
        pub(crate) const $name: $type = $value;
        abi! { $($rest)* }
    };
    (
        $(#[doc = $doc:literal])*
        table $name:ident of $row:ident ($($column:ident: $type:ident),+) = [$(($($value:tt),+)),+];
        $($rest:tt)*
    ) => {
        $(#[doc = $doc])*
        // Some columns are for the kernels alone.
        #[allow(dead_code)]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $row {
            $(pub $column: $type,)+
        }
        $(#[doc = $doc])*
        pub(crate) const $name: &[$row] = {
            // As many as there are columns.
            #[allow(clippy::too_many_arguments)]
            const fn row($($column: $type),+) -> $row {
                $row { $($column),+ }
            }
            &[$(row($($value),+)),+]
        };
        abi! { $($rest)* }
    };
}

mod attention;
mod common;
mod formats;
mod linear;
mod paged;
mod pointwise;
mod quantize_weights;
mod w8a16;

pub(crate) use attention::*;
pub(crate) use common::*;
pub(crate) use formats::*;
pub(crate) use linear::*;
pub(crate) use paged::*;
pub(crate) use pointwise::*;
pub(crate) use quantize_weights::*;
pub(crate) use w8a16::*;

/// Size and offsets as the build script found them and the kernels have asserted them.
mod layout {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/abi/layout.rs"));
}
