//! The report of this machine, beside which that of wasm32 is held.

fn main() {
    print!("{}", wasm::report());
}
