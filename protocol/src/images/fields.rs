//! Protobuf message as a list of fields, none of which is lost when another is changed.
//!
//! prost drops the fields that a struct does not name. Where a CRIU image is rewritten, the fields of a newer CRIU
//! have to survive, so it is edited in this form.

/// Encoded field of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Number of the field.
    pub number: u32,
    /// Key and value, exactly as they stood.
    pub encoded: Vec<u8>,
    /// Value of the field, if it is a varint.
    pub varint: Option<u64>,
}

/// A message's fields in order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Fields(Vec<Field>);

impl Fields {
    /// Splits a message into fields; `None` if the bytes are not a message. Groups are refused: no CRIU image has
    /// any.
    #[must_use]
    pub fn parse(message: &[u8]) -> Option<Self> {
        let mut fields = Vec::new();
        let mut rest = message;
        while !rest.is_empty() {
            let start = rest;
            let key = varint(&mut rest)?;
            let number = u32::try_from(key >> 3)
                .ok()
                .filter(|number| (1..1 << 29).contains(number))?;
            let mut value = None;
            match key & 7 {
                0 => value = Some(varint(&mut rest)?),
                1 => rest = rest.get(8..)?,
                2 => {
                    let len_bytes = usize::try_from(varint(&mut rest)?).ok()?;
                    rest = rest.get(len_bytes..)?;
                }
                5 => rest = rest.get(4..)?,
                _ => return None,
            }
            let encoded = start[..start.len() - rest.len()].to_vec();
            fields.push(Field {
                number,
                encoded,
                varint: value,
            });
        }
        Some(Self(fields))
    }

    /// Returns the fields in order.
    pub fn iter(&self) -> impl Iterator<Item = &Field> {
        self.0.iter()
    }

    /// Returns the last varint with this number, which is the one that counts.
    #[must_use]
    pub fn varint(&self, number: u32) -> Option<u64> {
        self.0
            .iter()
            .rev()
            .find(|field| field.number == number)?
            .varint
    }

    /// Sets a varint field: in place if the message has it, at the end if not.
    pub fn set_varint(&mut self, number: u32, value: u64) {
        let mut encoded = Vec::new();
        push_varint(&mut encoded, u64::from(number) << 3);
        push_varint(&mut encoded, value);
        let field = Field {
            number,
            encoded,
            varint: Some(value),
        };
        let first = self.0.iter().position(|old| old.number == number);
        self.0.retain(|old| old.number != number);
        match first {
            Some(at) => self.0.insert(at, field),
            None => self.0.push(field),
        }
    }

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.0
            .iter()
            .flat_map(|field| field.encoded.iter().copied())
            .collect()
    }
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        let bits = u64::from(byte & 0x7f);
        // The tenth byte has room for one bit.
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn push_varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let [low, ..] = value.to_le_bytes();
        value >>= 7;
        if value == 0 {
            return out.push(low & 0x7f);
        }
        out.push(low | 0x80);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::images::Inventory;

    #[test]
    fn setting_a_field_keeps_the_others_and_their_order() {
        // 1: varint 2, 200: "new", 8: varint 5, 201: fixed64, 202: fixed32.
        let message = [
            &[0x08, 2, 0xc2, 0x0c, 3][..],
            b"new",
            &[0x40, 5, 0xc9, 0x0c],
            &[7; 8],
            &[0xd5, 0x0c],
            &[9; 4],
        ];
        let message = message.concat();
        let mut fields = Fields::parse(&message).unwrap();
        assert_eq!(
            fields.iter().map(|field| field.number).collect::<Vec<_>>(),
            [1, 200, 8, 201, 202]
        );
        assert_eq!(fields.encode(), message);
        fields.set_varint(8, 300);
        let mut expected = message.clone();
        expected.splice(8..10, [0x40, 0xac, 0x02]);
        assert_eq!(fields.encode(), expected);
        assert_eq!(
            Inventory::decode(&expected[..]).unwrap().dump_uptime,
            Some(300)
        );
    }

    proptest! {
        #[test]
        fn any_inventory_survives(img_version: u32, dump_uptime: Option<u64>, run_id: Option<String>, value: u64) {
            let inventory = Inventory { img_version, dump_uptime, dump_criu_run_id: run_id, ..Inventory::default() };
            let mut fields = Fields::parse(&inventory.encode_to_vec()).unwrap();
            prop_assert_eq!(Inventory::decode(&fields.encode()[..]).unwrap(), inventory.clone());
            fields.set_varint(8, value);
            prop_assert_eq!(fields.varint(8), Some(value));
            let expected = Inventory { dump_uptime: Some(value), ..inventory };
            prop_assert_eq!(Inventory::decode(&fields.encode()[..]).unwrap(), expected);
        }

        #[test]
        fn what_parses_encodes_to_itself(bytes: Vec<u8>) {
            if let Some(fields) = Fields::parse(&bytes) {
                prop_assert_eq!(fields.encode(), bytes);
            }
        }
    }
}
