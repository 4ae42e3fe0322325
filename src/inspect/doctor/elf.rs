//! For which machine a program is, and whether it needs anything of it: the ELF header (elf(5)).

const MAGIC: &[u8] = b"\x7fELF";
const LITTLE_ENDIAN: u8 = 1;
/// `PT_INTERP`: the program that loads a dynamic one.
const INTERPRETER: u64 = 3;

/// What a program's header says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Elf {
    /// As [`std::env::consts::ARCH`] has it, else `e_machine` as a number.
    pub(super) machine: String,
    /// The loader that it needs; none where it is static.
    pub(super) interpreter: Option<String>,
}

/// Reads a header; `None` where the bytes are no ELF program.
pub(super) fn read_elf(bytes: &[u8]) -> Option<Elf> {
    if bytes.get(..4)? != MAGIC {
        return None;
    }
    let (wide, little) = (*bytes.get(4)? == 2, *bytes.get(5)? == LITTLE_ENDIAN);
    let number = |at: usize, size: usize| {
        let mut field: Vec<u8> = bytes.get(at..at.checked_add(size)?)?.to_vec();
        if little {
            field.reverse();
        }
        Some(field.iter().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)))
    };
    let place = |at: usize, size: usize| usize::try_from(number(at, size)?).ok();
    let machine = number(18, 2)?;
    let (table, entry, count) = if wide {
        (place(32, 8)?, place(54, 2)?, place(56, 2)?)
    } else {
        (place(28, 4)?, place(42, 2)?, place(44, 2)?)
    };
    let (offset, size, word) = if wide { (8, 32, 8) } else { (4, 16, 4) };
    let interpreter = (0..count).find_map(|index| {
        let header = table.checked_add(index.checked_mul(entry)?)?;
        if number(header, 4)? != INTERPRETER {
            return None;
        }
        let (start, length) = (place(header + offset, word)?, place(header + size, word)?);
        let name = bytes.get(start..start.checked_add(length)?).unwrap_or_default();
        Some(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
    });
    Some(Elf { machine: machine_name(machine, wide, little), interpreter })
}

/// `EM_…` (elf.h).
fn machine_name(machine: u64, wide: bool, little: bool) -> String {
    match (machine, wide, little) {
        (62, ..) => "x86_64".to_owned(),
        (183, ..) => "aarch64".to_owned(),
        (3, ..) => "x86".to_owned(),
        (40, ..) => "arm".to_owned(),
        (22, ..) => "s390x".to_owned(),
        (21, _, true) => "powerpc64le".to_owned(),
        (21, _, false) => "powerpc64".to_owned(),
        (243, true, _) => "riscv64".to_owned(),
        (other, ..) => format!("machine {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A 64-bit header with one program header.
    fn elf(little: bool, machine: u16, kind: u32, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; 120];
        bytes[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, if little { 1 } else { 2 }]);
        let mut put = |at: usize, value: u64, size: usize| {
            let mut field = value.to_be_bytes()[8 - size..].to_vec();
            if little {
                field.reverse();
            }
            bytes[at..at + size].copy_from_slice(&field);
        };
        put(18, machine.into(), 2);
        put(32, 64, 8);
        put(54, 56, 2);
        put(56, 1, 2);
        put(64, kind.into(), 4);
        put(72, 120, 8);
        put(96, name.len() as u64, 8);
        [bytes, name.as_bytes().to_vec()].concat()
    }

    #[test]
    fn machine_and_loader_are_found_in_either_byte_order() {
        let of = |bytes: &[u8]| read_elf(bytes).expect("an ELF program");
        let loader = Some("/lib/ld.so".to_owned());
        assert_eq!(
            of(&elf(true, 62, 3, "/lib/ld.so\0")),
            Elf { machine: "x86_64".into(), interpreter: loader.clone() }
        );
        assert_eq!(of(&elf(false, 22, 3, "/lib/ld.so\0")), Elf { machine: "s390x".into(), interpreter: loader });
        assert_eq!(of(&elf(true, 183, 1, "")), Elf { machine: "aarch64".into(), interpreter: None });
        assert_eq!(of(&elf(true, 999, 1, "")).machine, "machine 999");
    }

    #[test]
    fn this_very_program_is_for_this_machine() {
        let own = std::fs::read("/proc/self/exe").expect("readable");
        assert_eq!(read_elf(&own).expect("an ELF program").machine, std::env::consts::ARCH);
    }

    #[test]
    fn what_is_cut_short_or_none_is_survived() {
        let whole = elf(true, 62, 3, "/lib/ld.so\0");
        for length in 0..whole.len() {
            let _ = read_elf(&whole[..length]);
        }
        assert_eq!(read_elf(b"#!/bin/sh\n"), None);
    }
}
