//! Does nothing: the least that a process costs. `hack/bench.sh` gives it the size of the plugin's binary: read-only data
//! that the kernel maps and that no instruction reads.

/// How many bytes of padding; set when this is compiled.
const SIZE: usize = match option_env!("EMPTY_PADDING") {
    Some(text) => match usize::from_str_radix(text, 10) {
        Ok(size) => size,
        Err(_) => panic!("EMPTY_PADDING: expected a number"),
    },
    None => 0,
};

#[used]
static PADDING: [u8; SIZE] = [0; SIZE];

fn main() {}
