//! Function tables of libraries that are loaded at run time.
//!
//! Such a library is not linked: the program starts without it, and a missing function is an error with a
//! sentence.

/// Declares a struct of functions with the library's names, each of which returns a C integer, and its lookup.
macro_rules! table {
    ($table:ident: $( $name:ident = $symbol:literal ($($argument:ty),*); )+) => {
        struct $table {
            $( $name: unsafe extern "C" fn($($argument),*) -> ::std::ffi::c_int, )+
        }

        impl $table {
            /// The functions, or the name of the first that is missing.
            fn find(library: &::libloading::os::unix::Library) -> Result<Self, &'static str> {
                Ok(Self { $(
                    // SAFETY: the library's symbol of this name is a function of this type; these
                    // interfaces carry a version in a name or in the library's own wherever a type changed.
                    $name: match unsafe { library.get($symbol) } {
                        Ok(symbol) => *symbol,
                        Err(_) => return Err($symbol),
                    },
                )+ })
            }
        }
    };
}

pub(crate) use table;
