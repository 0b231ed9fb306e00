//! Counts allocations while a case asks for it.
//!
//! The switch costs one read of a flag for each allocation. A counter that is always on would add about 25 ns to each,
//! and so slow down those contenders most that allocate most. Zeroed memory comes from the operating system as it does
//! without this.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

static IS_ON: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The allocations of a piece of work.
pub struct Counted {
    pub count: u64,
    /// The bytes that are still allocated after it.
    pub bytes: i64,
}

/// Counts the allocations of all threads while `work` runs.
pub fn count(work: impl FnOnce()) -> Counted {
    COUNT.store(0, Relaxed);
    BYTES.store(0, Relaxed);
    IS_ON.store(true, Relaxed);
    work();
    IS_ON.store(false, Relaxed);
    Counted { count: COUNT.load(Relaxed), bytes: BYTES.load(Relaxed) }
}

fn note(count: u64, bytes: i64) {
    if IS_ON.load(Relaxed) {
        COUNT.fetch_add(count, Relaxed);
        BYTES.fetch_add(bytes, Relaxed);
    }
}

// Sizes are at most `isize::MAX`, so they fit.
// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size() as i64);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(1, layout.size() as i64);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(1, size as i64 - layout.size() as i64);
        // SAFETY: the caller keeps the contract.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        note(0, -(layout.size() as i64));
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(memory, layout) }
    }
}
