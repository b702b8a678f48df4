//! The CUDA driver interface, loaded on demand.
//!
//! A table of the required functions, found in `libcuda.so.1` at run time: the program starts on
//! machines without a driver, and a process that does not use a GPU never loads it. (The `cudarc` crate
//! offers the whole interface, but ends the process if the library or a function is missing; here
//! both are errors with a sentence.) The library is never unloaded, because it has threads of its own.
//!
//! Functions here take the driver's arguments and check its results; `gpu.rs` manages ownership.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_ushort, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::CudaError;
use crate::table::table;

/// The name for the dynamic linker.
const LIBRARY: &str = "libcuda.so.1";
/// An operation that uses host memory and no GPU memory.
pub(super) const REGISTER: &str = "register the region with the GPU";

/// Attributes of a device, by the driver's numbers.
#[derive(Clone, Copy, Debug)]
pub(super) enum DeviceAttribute {
    Multiprocessors = 16,
    KernelTimeLimit = 17,
    CanMapHostMemory = 19,
    VirtualMemory = 102,
    ComputeMode = 20,
    ComputeMajor = 75,
    ComputeMinor = 76,
}

/// Attributes of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) enum FunctionAttribute {
    ThreadsMax = 0,
    StaticSharedBytes = 1,
    LocalBytes = 3,
}

/// The share of shared memory in percent of the memory that the L1 cache and shared memory have together.
const PREFERRED_SHARED_CARVEOUT: c_int = 9;

/// The stream's work is still in progress.
const NOT_READY: c_int = 600;
const NOT_FOUND: c_int = 500;

/// What the driver says about an address that it does not know.
const INVALID_VALUE: c_int = 1;

/// Attributes of an address, by the driver's numbers.
#[derive(Clone, Copy, Debug)]
pub(super) enum PointerAttribute {
    Context = 1,
    MemoryType = 2,
    IsManaged = 8,
    DeviceOrdinal = 9,
}

/// Objects of the driver. Zero is none.
pub(super) type Context = usize;
pub(super) type Event = usize;
pub(super) type Module = usize;
pub(super) type Function = usize;
pub(super) type Stream = usize;
/// Memory of a GPU without an address.
pub(super) type Allocation = u64;
/// An address in the GPU's address space.
pub(super) type DeviceAddress = u64;

table! {
    Table:
    init = "cuInit" (c_uint);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_bus_id = "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Context, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_bind = "cuCtxSetCurrent" (Context);
    context_bound = "cuCtxGetCurrent" (*mut Context);
    module_load = "cuModuleLoadData" (*mut Module, *const c_void);
    module_unload = "cuModuleUnload" (Module);
    module_function = "cuModuleGetFunction" (*mut Function, Module, *const c_char);
    function_attribute = "cuFuncGetAttribute" (*mut c_int, c_int, Function);
    set_function_attribute = "cuFuncSetAttribute" (Function, c_int, c_int);
    resident_blocks = "cuOccupancyMaxActiveBlocksPerMultiprocessor" (*mut c_int, Function, c_int, usize);
    host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister" (*mut c_void);
    host_address = "cuMemHostGetDevicePointer_v2" (*mut DeviceAddress, *mut c_void, c_uint);
    allocate = "cuMemAlloc_v2" (*mut DeviceAddress, usize);
    free = "cuMemFree_v2" (DeviceAddress);
    granularity = "cuMemGetAllocationGranularity" (*mut usize, *const AllocationProperties, c_int);
    create = "cuMemCreate" (*mut Allocation, usize, *const AllocationProperties, c_ulonglong);
    release = "cuMemRelease" (Allocation);
    reserve_addresses = "cuMemAddressReserve" (*mut DeviceAddress, usize, usize, DeviceAddress, c_ulonglong);
    free_addresses = "cuMemAddressFree" (DeviceAddress, usize);
    map = "cuMemMap" (DeviceAddress, usize, usize, Allocation, c_ulonglong);
    unmap = "cuMemUnmap" (DeviceAddress, usize);
    set_access = "cuMemSetAccess" (DeviceAddress, usize, *const AccessDescription, usize);
    copy_in = "cuMemcpyHtoDAsync_v2" (DeviceAddress, *const c_void, usize, Stream);
    copy_out = "cuMemcpyDtoHAsync_v2" (*mut c_void, DeviceAddress, usize, Stream);
    stream_create = "cuStreamCreate" (*mut Stream, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (Stream);
    stream_query = "cuStreamQuery" (Stream);
    stream_wait = "cuStreamSynchronize" (Stream);
    stream_await = "cuStreamWaitEvent" (Stream, Event, c_uint);
    event_create = "cuEventCreate" (*mut Event, c_uint);
    event_record = "cuEventRecord" (Event, Stream);
    event_destroy = "cuEventDestroy_v2" (Event);
    pointer_attribute = "cuPointerGetAttribute" (*mut c_void, c_int, DeviceAddress);
    address_range = "cuMemGetAddressRange_v2" (*mut DeviceAddress, *mut usize, DeviceAddress);
    launch = "cuLaunchKernel" (Function, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Stream,
                               *mut *mut c_void, *mut *mut c_void);
    error_name = "cuGetErrorName" (c_int, *mut *const c_char);
    error_text = "cuGetErrorString" (c_int, *mut *const c_char);
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32_metadata: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: c_ushort,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDescription {
    location: Location,
    flags: c_int,
}

/// The loaded driver.
pub(super) struct Driver {
    table: Table,
    /// `cuFuncLoad`, since CUDA 12.4.
    function_load: Option<unsafe extern "C" fn(Function) -> c_int>,
}

/// The value that `make` first created; an error is not kept, since the next try may succeed.
fn once<T: Copy, E>(made: &OnceLock<T>, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    match made.get() {
        Some(made) => Ok(*made),
        None => make().map(|new| *made.get_or_init(|| new)),
    }
}

impl AllocationProperties {
    /// Ordinary memory of the GPU.
    fn on(device: c_int) -> Self {
        const PINNED: c_int = 1;
        const DEVICE: c_int = 1;
        Self {
            kind: PINNED,
            handle_types: 0,
            location: Location { kind: DEVICE, id: device },
            win32_metadata: ptr::null_mut(),
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// The shape of a launch.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    /// CUDA blocks.
    pub(super) blocks: u32,
    /// Threads of a block: in a row, and rows.
    pub(super) threads: u32,
    pub(super) rows: u32,
    /// Memory shared by a block's threads, besides the kernel's own declarations.
    pub(super) shared_bytes: u32,
}

impl Driver {
    /// Loads the driver's library, or the one at `library`, once, and initialises it.
    pub(super) fn load(library: Option<&Path>) -> Result<&'static Self, CudaError> {
        static DEFAULT: OnceLock<&Driver> = OnceLock::new();
        match library {
            Some(_) => Self::load_anew(library),
            None => once(&DEFAULT, || Self::load_anew(None)),
        }
    }

    fn load_anew(library: Option<&Path>) -> Result<&'static Self, CudaError> {
        let path = library.map_or_else(|| PathBuf::from(LIBRARY), Path::to_owned);
        // SAFETY: loading runs the library's constructors. It is the machine's own driver, or one named by
        // the operator.
        let library = match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => library,
            Err(error) => return Err(CudaError::NoDriver { path, error }),
        };
        let table =
            Table::find(&library).map_err(|symbol| CudaError::OldDriver { path, symbol })?;
        // SAFETY: the driver's symbol of this name is a function of this type.
        let function_load = unsafe { library.get("cuFuncLoad") }.ok().map(|symbol| *symbol);
        std::mem::forget(library);
        let driver = Self { table, function_load };
        // SAFETY: zero is the only valid flag.
        driver.check("initialise the GPU driver", unsafe { (driver.table.init)(0) })?;
        Ok(Box::leak(Box::new(driver)))
    }

    /// An error unless `code` is success.
    fn check(&self, what: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let text = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = ptr::null();
            // SAFETY: writes the address of a constant string, or leaves it null for a code that the
            // driver does not know.
            unsafe {
                function(code, &mut text);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        let name = text(self.table.error_name).unwrap_or_else(|| "unknown error".to_owned());
        let meaning = text(self.table.error_text).unwrap_or_default();
        Err(CudaError::Driver { what, bus_id: None, code, name, meaning })
    }

    /// The newest CUDA version that the driver supports; 13000 means 13.0.
    pub(super) fn version(&self) -> Result<u32, CudaError> {
        let mut version = 0;
        // SAFETY: writes one integer.
        self.check("ask for the driver's version", unsafe {
            (self.table.driver_version)(&mut version)
        })?;
        Ok(version.max(0) as u32)
    }

    /// Whether kernels are loaded at their first launch, without a way to change that here.
    pub(super) fn loads_lazily(&self) -> bool {
        self.function_load.is_none()
            && std::env::var_os("CUDA_MODULE_LOADING").is_none_or(|how| how != "EAGER")
    }

    pub(super) fn device_count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        self.check("count the GPUs", unsafe { (self.table.device_count)(&mut count) })?;
        Ok(count.max(0) as u32)
    }

    pub(super) fn device(&self, index: u32) -> Result<c_int, CudaError> {
        let mut device = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (self.table.device_get)(&mut device, index as c_int) };
        self.check("find the GPU", code)?;
        Ok(device)
    }

    pub(super) fn device_name(&self, device: c_int) -> Result<String, CudaError> {
        let mut name = [0u8; 128];
        // SAFETY: writes at most as many bytes as are given, a zero included.
        let code = unsafe {
            (self.table.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, device)
        };
        self.check("ask for the GPU's name", code)?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    pub(super) fn device_bus_id(&self, device: c_int) -> Result<String, CudaError> {
        let mut id = [0u8; 32];
        // SAFETY: writes at most as many bytes as are given, a zero included.
        let code = unsafe {
            (self.table.device_bus_id)(id.as_mut_ptr().cast(), id.len() as c_int, device)
        };
        self.check("ask for the GPU's place on the bus", code)?;
        let id = CStr::from_bytes_until_nul(&id).unwrap_or_default();
        Ok(id.to_string_lossy().into_owned())
    }

    pub(super) fn device_memory(&self, device: c_int) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: writes one size.
        let code = unsafe { (self.table.device_memory)(&mut bytes, device) };
        self.check("ask for the GPU's memory", code)?;
        Ok(bytes as u64)
    }

    pub(super) fn device_attribute(
        &self,
        device: c_int,
        attribute: DeviceAttribute,
    ) -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one integer; the attribute is one of the driver's.
        let code = unsafe { (self.table.device_attribute)(&mut value, attribute as c_int, device) };
        self.check("ask for an attribute of the GPU", code)?;
        Ok(value.max(0) as u32)
    }

    pub(super) fn retain_context(&self, device: c_int) -> Result<Context, CudaError> {
        let mut context = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.table.context_retain)(&mut context, device) };
        self.check("take the GPU", code)?;
        Ok(context)
    }

    pub(super) fn release_context(&self, device: c_int) {
        // SAFETY: no pointers; the driver counts who has retained it.
        unsafe { (self.table.context_release)(device) };
    }

    /// Makes `context` the current context of the calling thread.
    pub(super) fn bind(&self, context: Context) -> Result<(), CudaError> {
        // SAFETY: a handle from `retain_context`.
        self.check("use the GPU from this thread", unsafe { (self.table.context_bind)(context) })
    }

    /// Makes `context` current until the returned value is dropped. The thread may be one of a program that has its own context.
    pub(super) fn bind_for_now(&'static self, context: Context) -> Result<Bound, CudaError> {
        let mut before = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.table.context_bound)(&mut before) };
        self.check("ask for the context of this thread", code)?;
        if before != context {
            self.bind(context)?;
        }
        Ok(Bound { driver: self, before, is_other: before != context })
    }

    /// An attribute of an address that may have been made up; none if the driver does not know the address or the attribute.
    pub(super) fn pointer_attribute(
        &self,
        address: DeviceAddress,
        attribute: PointerAttribute,
    ) -> Result<Option<u64>, CudaError> {
        let mut value = 0u64;
        // SAFETY: writes an integer or a handle, of 8 bytes at most, and does not access the address.
        let code = unsafe {
            let value = (&raw mut value).cast();
            (self.table.pointer_attribute)(value, attribute as c_int, address)
        };
        if code == INVALID_VALUE {
            return Ok(None);
        }
        self.check("ask for an attribute of an address", code)?;
        Ok(Some(value))
    }

    /// Start and size of the allocation that has an address; none if there is none.
    pub(super) fn allocation_at(
        &self,
        address: DeviceAddress,
    ) -> Result<Option<(DeviceAddress, usize)>, CudaError> {
        const NOT_MAPPED: c_int = 500;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: writes an address and a size, and does not access the address.
        let code = unsafe { (self.table.address_range)(&mut base, &mut bytes, address) };
        if matches!(code, INVALID_VALUE | NOT_MAPPED) {
            return Ok(None);
        }
        self.check("ask for the allocation at an address", code)?;
        Ok(Some((base, bytes)))
    }

    /// An event after all that a stream has been given so far.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of the current context, or 1 or 2: the default streams.
    pub(super) unsafe fn event_after(&self, stream: Stream) -> Result<Event, CudaError> {
        const NO_TIMING: c_uint = 2;
        let mut event = 0;
        // SAFETY: writes one handle.
        self.check("create an event", unsafe { (self.table.event_create)(&mut event, NO_TIMING) })?;
        // SAFETY: the event's handle, and the caller's stream by its promise.
        let recorded = self.check("record an event on the caller's stream", unsafe {
            (self.table.event_record)(event, stream)
        });
        if recorded.is_err() {
            self.destroy_event(event);
        }
        recorded.map(|()| event)
    }

    /// The event stays in use until it has occurred.
    pub(super) fn destroy_event(&self, event: Event) {
        // SAFETY: a handle from `event_after`.
        unsafe { (self.table.event_destroy)(event) };
    }

    /// Has the later work of a stream wait for an event.
    ///
    /// # Safety
    ///
    /// `event` is an event of this process.
    pub(super) unsafe fn await_event(&self, stream: Stream, event: Event) -> Result<(), CudaError> {
        // SAFETY: handles, by the caller's promise.
        let code = unsafe { (self.table.stream_await)(stream, event, 0) };
        self.check("wait for the caller's stream", code)
    }

    /// # Safety
    ///
    /// `image` is a whole fatbin or cubin.
    pub(super) unsafe fn load_module(&self, image: &[u8]) -> Result<Module, CudaError> {
        let mut module = 0;
        // SAFETY: the driver reads as far as the image's own header says, which is its end by the
        // caller's promise.
        let code = unsafe { (self.table.module_load)(&mut module, image.as_ptr().cast()) };
        self.check("load the kernels", code)?;
        Ok(module)
    }

    pub(super) fn unload_module(&self, module: Module) {
        // SAFETY: a handle from `load_module`; gpu.rs ensures that nothing of it runs.
        unsafe { (self.table.module_unload)(module) };
    }

    /// The kernel of this name, loaded; none if the module has no such kernel.
    pub(super) fn function(
        &self,
        module: Module,
        name: &CStr,
    ) -> Result<Option<Function>, CudaError> {
        let mut function = 0;
        // SAFETY: writes one handle; the name is zero terminated.
        let code = unsafe { (self.table.module_function)(&mut function, module, name.as_ptr()) };
        if code == NOT_FOUND {
            return Ok(None);
        }
        self.check("find the kernel", code)?;
        if let Some(load) = self.function_load {
            // A module may be loaded lazily, and a load while a persistent kernel runs waits
            // for that kernel's end.
            // SAFETY: a handle that the driver has just returned.
            self.check("load the kernel", unsafe { load(function) })?;
        }
        Ok(Some(function))
    }

    pub(super) fn function_attribute(
        &self,
        function: Function,
        attribute: FunctionAttribute,
    ) -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one integer; the attribute is one of the driver's.
        let code =
            unsafe { (self.table.function_attribute)(&mut value, attribute as c_int, function) };
        self.check("ask for an attribute of the kernel", code)?;
        Ok(value.max(0) as u32)
    }

    /// Requests the maximum share of shared memory on multiprocessors that run the kernel; see
    /// `occupancy`. Must precede any query about its blocks and any launch.
    pub(super) fn prefer_shared_memory(&self, function: Function) -> Result<(), CudaError> {
        // SAFETY: no pointers; a handle from `function`, and an attribute and a value of the driver's.
        let code = unsafe {
            (self.table.set_function_attribute)(function, PREFERRED_SHARED_CARVEOUT, 100)
        };
        self.check("have the kernel's multiprocessors prefer shared memory", code)
    }

    /// Number of the kernel's blocks that fit on one multiprocessor.
    pub(super) fn resident_blocks(&self, function: Function, grid: Grid) -> Result<u32, CudaError> {
        let mut blocks = 0;
        // SAFETY: writes one integer.
        let code = unsafe {
            let (threads, shared) =
                ((grid.threads * grid.rows) as c_int, grid.shared_bytes as usize);
            (self.table.resident_blocks)(&mut blocks, function, threads, shared)
        };
        self.check("ask how many blocks fit", code)?;
        Ok(blocks.max(0) as u32)
    }

    /// Makes host memory visible to the GPU; returns its address there.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until `unregister`.
    pub(super) unsafe fn register(
        &self,
        base: *mut u8,
        bytes: usize,
    ) -> Result<DeviceAddress, CudaError> {
        const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
        // SAFETY: mapped memory, by the caller's promise.
        let code = unsafe { (self.table.host_register)(base.cast(), bytes, PORTABLE_AND_MAPPED) };
        self.check(REGISTER, code)?;
        let mut address = 0;
        // SAFETY: writes one address; the memory has just been registered.
        let code = unsafe { (self.table.host_address)(&mut address, base.cast(), 0) };
        let found = self.check("find the region's address on the GPU", code);
        if found.is_err() {
            self.unregister(base);
        }
        found.map(|()| address)
    }

    pub(super) fn unregister(&self, base: *mut u8) {
        // SAFETY: the driver tracks its registrations and rejects anything else.
        unsafe { (self.table.host_unregister)(base.cast()) };
    }

    pub(super) fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CudaError> {
        let mut address = 0;
        // SAFETY: writes one address.
        let code = unsafe { (self.table.allocate)(&mut address, bytes) };
        self.check("allocate GPU memory", code)?;
        Ok(address)
    }

    pub(super) fn free(&self, address: DeviceAddress) {
        // SAFETY: the driver tracks its allocations and rejects anything else.
        unsafe { (self.table.free)(address) };
    }

    /// A range of `bytes` addresses that all map the same `piece` bytes of memory; both are multiples of the driver's
    /// granularity, see [`Self::granularity`].
    pub(super) fn map_again_and_again(
        &self,
        device: c_int,
        piece: usize,
        bytes: usize,
    ) -> Result<DeviceAddress, CudaError> {
        const READ_AND_WRITE: c_int = 3;
        let (mut memory, mut base) = (0, 0);
        let properties = AllocationProperties::on(device);
        // SAFETY: reads the properties, writes one handle.
        let code = unsafe { (self.table.create)(&mut memory, piece, &properties, 0) };
        self.check("allocate GPU memory", code)?;
        // SAFETY: writes one address.
        let code = unsafe { (self.table.reserve_addresses)(&mut base, bytes, 0, 0, 0) };
        let mut done = self.check("reserve addresses of the GPU", code);
        let mut mapped = 0;
        while done.is_ok() && mapped < bytes {
            // SAFETY: inside the reserved range, at an unmapped address.
            let code = unsafe { (self.table.map)(base + mapped as u64, piece, 0, memory, 0) };
            done = self.check("map GPU memory", code);
            mapped += if done.is_ok() { piece } else { 0 };
        }
        if done.is_ok() {
            let access = AccessDescription { location: properties.location, flags: READ_AND_WRITE };
            // SAFETY: reads one description; the range is mapped.
            let code = unsafe { (self.table.set_access)(base, bytes, &access, 1) };
            done = self.check("allow access to GPU memory", code);
        }
        // The mappings keep the memory.
        // SAFETY: a handle from `create`.
        unsafe { (self.table.release)(memory) };
        if done.is_err() && base != 0 {
            // SAFETY: the mapped part of the reserved range, which has no user.
            unsafe {
                if mapped > 0 {
                    (self.table.unmap)(base, mapped);
                }
                (self.table.free_addresses)(base, bytes);
            }
        }
        done.map(|()| base)
    }

    /// The unit of the sizes for [`Self::map_again_and_again`].
    pub(super) fn granularity(&self, device: c_int) -> Result<usize, CudaError> {
        const MINIMUM: c_int = 0;
        let (mut bytes, properties) = (0, AllocationProperties::on(device));
        // SAFETY: reads the properties, writes one size.
        let code = unsafe { (self.table.granularity)(&mut bytes, &properties, MINIMUM) };
        self.check("ask for the granularity of GPU memory", code)?;
        Ok(bytes.max(1))
    }

    /// Unmaps a range of [`Self::map_again_and_again`].
    pub(super) fn unmap(&self, base: DeviceAddress, bytes: usize) {
        // SAFETY: the driver tracks its mappings and rejects anything else.
        unsafe {
            (self.table.unmap)(base, bytes);
            (self.table.free_addresses)(base, bytes);
        }
    }

    /// Copies `values` to `to`, which has room for them; the copy is complete on return. Nothing may run on the GPU.
    ///
    /// (`cuMemcpyHtoD` may return earlier: when the driver has read ordinary memory. The copy is then
    /// in flight on the default stream, and streams created as non-blocking do not wait for that one.)
    pub(super) fn copy_in<T: Copy>(
        &self,
        stream: Stream,
        to: DeviceAddress,
        values: &[T],
    ) -> Result<(), CudaError> {
        // SAFETY: reads the slice's bytes, which live until the copy has ended; the driver checks the destination.
        let code = unsafe {
            (self.table.copy_in)(to, values.as_ptr().cast(), size_of_val(values), stream)
        };
        let begun = self.check("copy to the GPU", code);
        // SAFETY: a handle from `stream`.
        let ended = self.check("copy to the GPU", unsafe { (self.table.stream_wait)(stream) });
        begun.and(ended)
    }

    /// Begins a copy to the GPU; [`Self::is_done`] tells whether it has ended.
    ///
    /// # Safety
    ///
    /// `from` must be `bytes` of registered memory, and stay so until the copy has ended; `to` must have room for them.
    pub(super) unsafe fn begin_copy_in(
        &self,
        stream: Stream,
        to: DeviceAddress,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: as this function's.
        self.check("copy to the GPU", unsafe {
            (self.table.copy_in)(to, from.cast(), bytes, stream)
        })
    }

    /// Begins a copy from the GPU; [`Self::is_done`] tells whether it has ended.
    ///
    /// # Safety
    ///
    /// `to` must be `bytes` of registered memory that is accessed as other processes' is, and stay so until the copy has ended.
    pub(super) unsafe fn begin_copy_out(
        &self,
        stream: Stream,
        to: *mut u8,
        from: DeviceAddress,
        bytes: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: as this function's.
        let code = unsafe { (self.table.copy_out)(to.cast(), from, bytes, stream) };
        self.check("copy from the GPU", code)
    }

    pub(super) fn stream(&self) -> Result<Stream, CudaError> {
        const NON_BLOCKING: c_uint = 1;
        let mut stream = 0;
        // SAFETY: writes one handle.
        let code = unsafe { (self.table.stream_create)(&mut stream, NON_BLOCKING) };
        self.check("create a stream", code)?;
        Ok(stream)
    }

    pub(super) fn destroy_stream(&self, stream: Stream) {
        // SAFETY: a handle from `stream`.
        unsafe { (self.table.stream_destroy)(stream) };
    }

    /// Whether the kernels of a stream have ended. Failed work is an error.
    pub(super) fn is_done(&self, stream: Stream) -> Result<bool, CudaError> {
        self.query("run the kernel", stream)
    }

    /// Whether the copies of a stream have ended. Failed work is an error.
    pub(super) fn is_copied(&self, stream: Stream) -> Result<bool, CudaError> {
        self.query("copy memory of the GPU", stream)
    }

    fn query(&self, what: &'static str, stream: Stream) -> Result<bool, CudaError> {
        // SAFETY: a handle from `stream`.
        match unsafe { (self.table.stream_query)(stream) } {
            NOT_READY => Ok(false),
            code => self.check(what, code).map(|()| true),
        }
    }

    /// Starts a kernel of one argument, an address.
    ///
    /// # Safety
    ///
    /// The kernel takes one address, and the data there is valid for it.
    pub(super) unsafe fn launch(
        &self,
        function: Function,
        grid: Grid,
        stream: Stream,
        argument: DeviceAddress,
    ) -> Result<(), CudaError> {
        let mut argument = argument;
        let mut arguments = [(&raw mut argument).cast::<c_void>()];
        // SAFETY: the one argument of the kernel, by the caller's promise; the driver copies it.
        let code = unsafe {
            (self.table.launch)(
                function,
                grid.blocks,
                1,
                1,
                grid.threads,
                grid.rows,
                1,
                grid.shared_bytes,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.check("start the kernel", code)
    }
}

/// A context that is current on this thread; the one before it is current again when this is dropped.
pub(super) struct Bound {
    driver: &'static Driver,
    before: Context,
    is_other: bool,
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_other {
            // Nothing can be done if this fails: the next call of the thread's program does as well.
            let _ = self.driver.bind(self.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_made_once_is_kept_and_an_error_is_not() {
        let made = OnceLock::new();
        assert_eq!(once(&made, || Err("no driver yet")), Err("no driver yet"));
        assert_eq!(once(&made, || Ok::<_, &str>(1)), Ok(1));
        assert_eq!(once(&made, || -> Result<i32, &str> { panic!("it is there") }), Ok(1));
    }
}
