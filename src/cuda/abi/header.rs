//! The build script's reading of the rooms: C++ headers for the kernels, and the layout that the crate is
//! held to. No part of the crate.
#![allow(dead_code, unused_imports)]

use std::fmt::Write as _;
use std::fs;
use std::marker::PhantomData;
use std::path::Path;

/// How a type is written in C++.
trait Cpp {
    /// The declaration of `name` as one of this type.
    fn declare(name: &str) -> String;
}

macro_rules! cpp {
    ($($type:ty => $cpp:literal),+ $(,)?) => {
        $(impl Cpp for $type {
            fn declare(name: &str) -> String {
                format!("{} {name}", $cpp)
            }
        })+
    };
}

cpp! {
    bool => "bool",
    i8 => "int8_t",
    u8 => "uint8_t",
    i32 => "int32_t",
    u32 => "uint32_t",
    i64 => "int64_t",
    u64 => "uint64_t",
    f32 => "float",
    Void => "void",
    Char => "char",
    Float2 => "float2",
    Float4 => "float4",
    LongLong => "unsigned long long",
}

enum Void {}
enum Char {}
enum Float2 {}
enum Float4 {}
enum LongLong {}

/// An address on the GPU.
#[repr(transparent)]
struct Const<T>(u64, PhantomData<T>);
#[repr(transparent)]
struct Mut<T>(u64, PhantomData<T>);
/// A constant's type in C++.
struct Count<T>(PhantomData<T>);

impl<T: Cpp> Cpp for Const<T> {
    fn declare(name: &str) -> String {
        format!("const {}", Mut::<T>::declare(name))
    }
}

impl<T: Cpp> Cpp for Mut<T> {
    fn declare(name: &str) -> String {
        format!("{}* {name}", T::declare("").trim_end())
    }
}

impl<T: Cpp> Cpp for Count<T> {
    fn declare(name: &str) -> String {
        T::declare(name)
    }
}

impl<T: Cpp, const N: usize> Cpp for [T; N] {
    fn declare(name: &str) -> String {
        T::declare(&format!("{name}[{N}]"))
    }
}

/// The type of a constant.
trait Constant {
    /// Here.
    type Value;
    fn literal(value: Self::Value) -> String;
}

impl<T: Cpp> Constant for Count<T> {
    type Value = usize;
    fn literal(value: usize) -> String {
        value.to_string()
    }
}

impl Constant for u32 {
    type Value = u32;
    fn literal(value: u32) -> String {
        format!("{value}u")
    }
}

impl Constant for f32 {
    type Value = f32;
    fn literal(value: f32) -> String {
        format!("{value:?}f")
    }
}

/// A struct's field: its comment, declaration and offset.
struct Field {
    doc: &'static [&'static str],
    name: &'static str,
    declaration: String,
    offset: usize,
}

/// What a room has.
enum Item {
    Struct {
        doc: &'static [&'static str],
        name: &'static str,
        align: Option<usize>,
        size: usize,
        fields: Vec<Field>,
    },
    Constant {
        doc: &'static [&'static str],
        declaration: String,
        value: String,
    },
    Table {
        doc: &'static [&'static str],
        name: &'static str,
        columns: String,
        rows: Vec<String>,
    },
}

macro_rules! abi {
    (@ [$($item:expr,)*]) => {
        pub(super) fn described() -> Vec<super::Item> {
            vec![$($item,)*]
        }
    };
    (
        @ [$($item:expr,)*]
        $(#[doc = $doc:literal])*
        $(#[derive($($derive:ident),+)])?
        struct $name:ident $(align($align:literal))? {
            $($(#[doc = $field_doc:literal])* $field:ident: $type:ty,)+
        }
        $($rest:tt)*
    ) => {
        #[repr(C $(, align($align))?)]
        pub(super) struct $name {
            $($field: $type,)+
        }

        impl super::Cpp for $name {
            fn declare(name: &str) -> String {
                format!("{} {name}", stringify!($name))
            }
        }

        abi! {
            @ [$($item,)* super::Item::Struct {
                doc: &[$($doc),*],
                name: stringify!($name),
                align: None $(.or(Some($align)))?,
                size: size_of::<$name>(),
                fields: vec![$(super::Field {
                    doc: &[$($field_doc),*],
                    name: stringify!($field),
                    declaration: <$type as super::Cpp>::declare(stringify!($field)),
                    offset: std::mem::offset_of!($name, $field),
                }),+],
            },]
            $($rest)*
        }
    };
    (
        @ [$($item:expr,)*]
        $(#[doc = $doc:literal])*
        const $name:ident: $type:ty = $value:expr;
        $($rest:tt)*
    ) => {
        pub(super) const $name: <$type as super::Constant>::Value = $value;

        abi! {
            @ [$($item,)* super::Item::Constant {
                doc: &[$($doc),*],
                declaration: <$type as super::Cpp>::declare(stringify!($name)),
                value: <$type as super::Constant>::literal($name),
            },]
            $($rest)*
        }
    };
    (
        @ [$($item:expr,)*]
        $(#[doc = $doc:literal])*
        table $name:ident of $row:ident ($($column:ident: $type:ident),+) = [$(($($value:tt),+)),+];
        $($rest:tt)*
    ) => {
        abi! {
            @ [$($item,)* super::Item::Table {
                doc: &[$($doc),*],
                name: stringify!($name),
                columns: [$(stringify!($column)),+].join(", "),
                rows: vec![$([$(stringify!($value)),+].join(", ")),+],
            },]
            $($rest)*
        }
    };
    ($($all:tt)*) => {
        abi! { @ [] $($all)* }
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

use attention::*;
use common::*;
use formats::*;
use linear::*;
use paged::*;
use pointwise::*;
use quantize_weights::*;
use w8a16::*;

/// Writes `abi/<room>.cuh` and `abi/layout.rs` into `out`.
pub fn write(out: &Path) -> Result<(), String> {
    let folder = out.join("abi");
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let put = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
    };
    let mut layout = String::new();
    for (room, reaches, items) in [
        ("attention", &["linear"][..], attention::described()),
        ("common", &[], common::described()),
        ("formats", &["common"], formats::described()),
        ("linear", &["common"], linear::described()),
        ("paged", &["common"], paged::described()),
        ("pointwise", &["common"], pointwise::described()),
        (
            "quantize_weights",
            &["common"],
            quantize_weights::described(),
        ),
        ("w8a16", &["linear"], w8a16::described()),
    ] {
        put(&format!("{room}.cuh"), &header(room, reaches, &items))?;
        layout.extend(items.iter().map(Item::rust_asserts));
    }
    put("layout.rs", &layout)
}

fn header(room: &str, reaches: &[&str], items: &[Item]) -> String {
    let mut text = format!(
        "// Written by the build script from src/cuda/abi/{room}.rs: change that.\n#pragma once\n\n\
         #include <stddef.h>\n#include <stdint.h>\n\n"
    );
    for other in reaches {
        let _ = writeln!(text, "#include \"abi/{other}.cuh\"");
    }
    text.push_str("\nnamespace fused {\n");
    text.extend(items.iter().map(Item::cpp));
    text.push_str("\n}  // namespace fused\n");
    text
}

fn comment(indent: &str, doc: &[&str]) -> String {
    doc.iter()
        .map(|line| format!("{indent}//{line}\n"))
        .collect()
}

impl Item {
    fn cpp(&self) -> String {
        match self {
            Self::Struct {
                doc,
                name,
                align,
                size,
                fields,
            } => {
                let align = align.map_or(String::new(), |a| format!("alignas({a}) "));
                let mut text = format!("\n{}struct {align}{name} {{\n", comment("", doc));
                for field in fields {
                    text += &comment("  ", field.doc);
                    let _ = writeln!(text, "  {};", field.declaration);
                }
                let _ = writeln!(text, "}};\nstatic_assert(sizeof({name}) == {size});");
                for Field {
                    name: f, offset, ..
                } in fields
                {
                    let _ = writeln!(text, "static_assert(offsetof({name}, {f}) == {offset});");
                }
                text
            }
            Self::Constant {
                doc,
                declaration,
                value,
            } => format!("\n{}constexpr {declaration} = {value};\n", comment("", doc)),
            Self::Table {
                doc,
                name,
                columns,
                rows,
            } => {
                let mut text = format!("\n{}// ({columns})\n", comment("", doc));
                let _ = write!(text, "#define FUSED_{name}(X)");
                for row in rows {
                    let _ = write!(text, " X({row})");
                }
                text + "\n"
            }
        }
    }

    fn rust_asserts(&self) -> String {
        let Self::Struct {
            name, size, fields, ..
        } = self
        else {
            return String::new();
        };
        let mut text = format!("const _: () = assert!(size_of::<{name}>() == {size});\n");
        for Field {
            name: f, offset, ..
        } in fields
        {
            let _ = writeln!(
                text,
                "const _: () = assert!(std::mem::offset_of!({name}, {f}) == {offset});"
            );
        }
        text
    }
}
