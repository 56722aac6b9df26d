//! Ranges for NVIDIA's profilers: what the host is launching. Without the feature `nvtx` there are none.
//!
//! The library that passes them on comes with CUDA: `libnvtx3interop` since CUDA 13, `libnvToolsExt`
//! before. Where neither is found, nothing is named.

/// Names what this thread does until it is dropped.
pub(crate) struct Range {
    #[cfg(feature = "nvtx")]
    _open: Option<enabled::Open>,
}

/// Opens a range.
pub(crate) fn range(name: &str) -> Range {
    #[cfg(not(feature = "nvtx"))]
    let _ = name;
    Range {
        #[cfg(feature = "nvtx")]
        _open: enabled::open(name),
    }
}

#[cfg(feature = "nvtx")]
mod enabled {
    use libloading::Library;
    use std::ffi::{CString, c_char, c_int};
    use std::sync::OnceLock;

    const LIBRARIES: [&str; 4] = [
        "libnvtx3interop.so.1",
        "libnvToolsExt.so.1",
        "libnvtx3interop.so",
        "libnvToolsExt.so",
    ];

    /// The library's functions, which stay loaded.
    struct Functions {
        push: unsafe extern "C" fn(*const c_char) -> c_int,
        pop: unsafe extern "C" fn() -> c_int,
        _library: Library,
    }

    /// A range of this thread that is open; ranges close in the order in which guards are dropped, the
    /// last opened first.
    pub(super) struct Open {
        functions: &'static Functions,
        /// Ranges belong to the thread that opened them.
        _thread: std::marker::PhantomData<*const ()>,
    }

    fn functions() -> Option<&'static Functions> {
        static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
        FUNCTIONS
            .get_or_init(|| LIBRARIES.iter().find_map(|name| load(name)))
            .as_ref()
    }

    fn load(name: &str) -> Option<Functions> {
        // SAFETY: these are NVIDIA's, whose initialisers ask nothing of the caller; the signatures
        // are those of nvToolsExt.h.
        unsafe {
            let library = Library::new(name).ok()?;
            let push = *library.get(b"nvtxRangePushA\0").ok()?;
            let pop = *library.get(b"nvtxRangePop\0").ok()?;
            Some(Functions {
                push,
                pop,
                _library: library,
            })
        }
    }

    pub(super) fn open(name: &str) -> Option<Open> {
        let functions = functions()?;
        let name = CString::new(name).ok()?;
        // SAFETY: the string ends with a zero and is copied by the call.
        unsafe { (functions.push)(name.as_ptr()) };
        Some(Open {
            functions,
            _thread: std::marker::PhantomData,
        })
    }

    impl Drop for Open {
        fn drop(&mut self) {
            // SAFETY: closes the range that this guard's thread opened last.
            unsafe { (self.functions.pop)() };
        }
    }
}
