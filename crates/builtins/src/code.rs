//! The code of functions: what instances are made of, built-in functions and modules alike.

use std::io::{self, Read};
use std::sync::Arc;

use onpath::dictionary::Dictionary;
use onpath::spec::MODULE_BYTES_MAX;
use onpath::{Failure, Function, Merge, Param, Register, Sizes, Spec, StateKind};

use crate::instances::Instances;
use crate::table::{BUILTINS, Builtin, builtin, file_of};

/// Reads a module, of at most [`MODULE_BYTES_MAX`].
pub fn read_module(file: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MODULE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MODULE_BYTES_MAX {
        let why = format!("it has more than {MODULE_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(bytes)
}
/// Why a function cannot be used. One sentence each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// No built-in function has this name, and it is no module's file.
    #[error(
        "there is no built-in function {0:?}: use {names}, the path of a WebAssembly module, which ends in .wasm, or NAME@sha256:DIGEST",
        names = names()
    )]
    Unknown(String),
    /// A parameter that the function does not have.
    #[error("the function {function:?} has no parameter {param:?}: {right}")]
    NoParam {
        /// The function.
        function: String,
        /// The parameter.
        param: String,
        /// What it has.
        right: String,
    },
    /// A value that a parameter cannot have.
    #[error("the function {function:?} does not take {param} = {value}: {why}")]
    WrongParam {
        /// The function.
        function: String,
        /// The parameter.
        param: String,
        /// The value.
        value: Param,
        /// What the function says.
        why: Failure,
    },
    /// Parameters that do not fit together, or that there is no memory for.
    #[error("the function {function:?} does not take its parameters: {why}")]
    WrongParams {
        /// The function.
        function: String,
        /// What the function says.
        why: Failure,
    },
    /// The path of its file is missing.
    #[error("the function {function:?} needs the parameter {param:?}: {what}")]
    NoFile {
        /// The function.
        function: String,
        /// The parameter.
        param: &'static str,
        /// Its meaning.
        what: &'static str,
    },
    /// The file cannot be used.
    #[error("the function {function:?} cannot use the file of {param:?}: {why}")]
    File {
        /// The function.
        function: String,
        /// The parameter.
        param: &'static str,
        /// What the function says.
        why: Failure,
    },
    /// The file is no module that can be a function.
    #[error("the module {file} cannot be used: {why}")]
    Module {
        /// The file.
        file: String,
        /// What is wrong and what would be right.
        why: String,
    },
    /// Several workers would each have a part of its state.
    #[error(
        "the state of {function} is `{state}`, as its manifest says, and each of {workers} workers would have a part of it on the path to a backend or through a proxy over TCP: set engine.workers = 1"
    )]
    Workers {
        /// The function.
        function: String,
        /// What the manifest says.
        state: StateKind,
        /// The workers of the engine.
        workers: usize,
    },
    /// The program was built without the host of modules.
    #[error(
        "the module {0} cannot be used: this program was built without WebAssembly (feature `wasm`)"
    )]
    NoHost(String),
}

fn names() -> String {
    let names: Vec<_> = BUILTINS.iter().map(|builtin| builtin.name).collect();
    names.join(", ")
}

/// What instances of a function are made of.
#[derive(Clone)]
pub enum Code {
    /// A built-in function, and the content of its file.
    Builtin(&'static Builtin, Arc<[u8]>, Instances),
    /// A compiled module.
    #[cfg(feature = "wasm")]
    Module(onpath::wasm::Module),
}

impl Code {
    /// The code of a function. `content` is that of its file ([`file_of`]), or nothing. Compiling a module takes long: call this where no
    /// message waits.
    pub fn open(spec: &Spec, content: &[u8]) -> Result<Self, LibraryError> {
        Self::open_until(spec, content, &|| false)
    }

    /// The same; it gives up compiling a module when `stop` says that it is no longer wanted.
    pub fn open_until(
        spec: &Spec,
        content: &[u8],
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, LibraryError> {
        if let Some(builtin) = builtin(&spec.function) {
            return Ok(Self::Builtin(builtin, content.into(), (builtin.instances)()));
        }
        if !spec.is_module() {
            return Err(LibraryError::Unknown(spec.function.clone()));
        }
        #[cfg(feature = "wasm")]
        {
            let file = || spec.function.clone();
            let module = onpath::wasm::Module::compile_until(content, stop);
            module.map(Self::Module).map_err(|why| LibraryError::Module { file: file(), why })
        }
        #[cfg(not(feature = "wasm"))]
        {
            let _ = (content, stop);
            Err(LibraryError::NoHost(spec.function.clone()))
        }
    }

    /// The memory that it takes besides that of its instances, in bytes.
    pub fn code_bytes(&self) -> u64 {
        match self {
            Self::Builtin(..) => 0,
            #[cfg(feature = "wasm")]
            Self::Module(module) => module.code_bytes(),
        }
    }

    /// The same code for another function: what a function's instances share is not shared with it.
    #[must_use]
    pub fn apart(&self) -> Self {
        match self {
            Self::Builtin(builtin, content, _) => {
                Self::Builtin(builtin, content.clone(), (builtin.instances)())
            }
            #[cfg(feature = "wasm")]
            Self::Module(module) => Self::Module(module.apart()),
        }
    }

    /// How its state belongs together.
    pub fn state(&self) -> StateKind {
        match self {
            Self::Builtin(..) => StateKind::Mergeable,
            #[cfg(feature = "wasm")]
            Self::Module(module) => module.manifest().map(|m| m.state).unwrap_or_default(),
        }
    }

    /// Whether this number of workers keeps its state together, see [`StateKind::fits`].
    pub fn check_workers(
        &self,
        spec: &Spec,
        workers: usize,
        hands_over: bool,
    ) -> Result<(), LibraryError> {
        let (state, function) = (self.state(), spec.function.clone());
        match state.fits(workers, hands_over) {
            true => Ok(()),
            false => Err(LibraryError::Workers { function, state, workers }),
        }
    }

    /// An instance, with the parameters of `spec` and a dictionary of its own if it names one.
    pub fn instance(&self, spec: &Spec, sizes: Sizes) -> Result<Box<dyn Function>, LibraryError> {
        let own = spec.dictionary.as_ref();
        let own = own.map(|_| Arc::new(Dictionary::new(spec.dictionary_kib)));
        self.instance_with(spec, sizes, own)
    }

    /// The same with this dictionary.
    pub fn instance_with(
        &self,
        spec: &Spec,
        sizes: Sizes,
        dictionary: Option<Arc<Dictionary>>,
    ) -> Result<Box<dyn Function>, LibraryError> {
        let mut function = self.make(spec, sizes, dictionary.clone())?;
        if let Some(dictionary) = dictionary {
            function.use_dictionary(dictionary);
        }
        for (param, value) in &spec.params {
            self.set(&mut *function, &spec.function, param, value)?;
        }
        if let Self::Builtin(Builtin { file: Some((param, what)), .. }, content, _) = self {
            let function_name = || spec.function.clone();
            if file_of(spec).is_none() {
                return Err(LibraryError::NoFile { function: function_name(), param, what });
            }
            function.configure(param, content).map_err(|why| LibraryError::File {
                function: function_name(),
                param,
                why,
            })?;
        }
        let wrong = |why| LibraryError::WrongParams { function: spec.function.clone(), why };
        function.ready().map_err(wrong)?;
        Ok(function)
    }

    /// Gives a function the value of a parameter. The one that is a file gets its content otherwise.
    fn set(
        &self,
        function: &mut dyn Function,
        name: &str,
        param: &str,
        value: &Param,
    ) -> Result<(), LibraryError> {
        let builtin = match self {
            Self::Builtin(builtin, ..) => Some(*builtin),
            #[cfg(feature = "wasm")]
            Self::Module(_) => None,
        };
        let wrong = |why| LibraryError::WrongParam {
            function: name.to_owned(),
            param: param.to_owned(),
            value: value.clone(),
            why,
        };
        if let Some(builtin) = builtin {
            if builtin.file.is_some_and(|(file, _)| file == param) {
                return Ok(());
            }
            if builtin.texts.iter().any(|(text, _)| *text == param) {
                return function.configure(param, value.text().as_bytes()).map_err(wrong);
            }
        }
        let is_setting = |register: &&Register| register.merge == Merge::Setting;
        let found = function.registers().iter().position(|r| is_setting(&r) && &*r.name == param);
        let Some(register) = found else {
            let settings = function.registers().iter().filter(is_setting).map(|r| &*r.name);
            let params: Vec<&str> = match builtin {
                Some(builtin) => builtin.params().collect(),
                None => settings.collect(),
            };
            let right = match params.as_slice() {
                [] => "it has none".to_owned(),
                params => format!("it has {}", params.join(", ")),
            };
            let (function, param) = (name.to_owned(), param.to_owned());
            return Err(LibraryError::NoParam { function, param, right });
        };
        let Param::Integer(integer) = value else {
            return Err(wrong(Failure("it is an integer".to_owned())));
        };
        function.write(register, *integer).map_err(wrong)
    }

    fn make(
        &self,
        spec: &Spec,
        sizes: Sizes,
        dictionary: Option<Arc<Dictionary>>,
    ) -> Result<Box<dyn Function>, LibraryError> {
        match self {
            Self::Builtin(_, _, instances) => {
                let _ = (spec, sizes, dictionary);
                Ok(instances())
            }
            #[cfg(feature = "wasm")]
            Self::Module(module) => {
                let limits = onpath::wasm::Limits {
                    memory_bytes: (spec.memory_mib as usize) << 20,
                    deadline_us: spec.deadline_us,
                    sizes,
                };
                let file = || spec.function.clone();
                match module.instance(limits, dictionary) {
                    Ok(instance) => Ok(Box::new(instance)),
                    Err(why) => Err(LibraryError::Module { file: file(), why }),
                }
            }
        }
    }
}
