//! Mappings and lists that do not end the reading of a file where they are wrong: what is in them that nobody
//! knows, and what stands where one of them should, is kept until a [`Section`](super::Section) tells it.

use super::Scalar;
use super::scalar::ScalarVisitor;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{
    DeserializeSeed, Deserializer, IgnoredAny, IntoDeserializer as _, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_saphyr::{Location, Spanned};
use std::fmt;
use std::marker::PhantomData;

/// A mapping whose keys are the fields of `T`.
pub(crate) struct Mapping<T>(pub(super) Result<Known<T>, Scalar>);

/// A list.
pub(crate) struct List<T>(pub(super) Result<Vec<T>, Scalar>);

/// What is known of a mapping, and its other keys.
pub(super) struct Known<T> {
    pub(super) fields: T,
    pub(super) others: Others,
}

/// Keys that are none of these.
#[derive(Default)]
pub(super) struct Others {
    pub(super) expected: &'static [&'static str],
    /// Each with the place of its value.
    pub(super) keys: Vec<(String, Location)>,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Mapping<T> {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        yaml.deserialize_any(MappingVisitor(PhantomData)).map(Self)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        yaml.deserialize_any(ListVisitor(PhantomData)).map(Self)
    }
}

/// Whatever is no mapping or list is what a scalar would be.
macro_rules! else_a_scalar {
    ($($visit:ident($($value:ident: $type:ty)?),)*) => {$(
        fn $visit<E: serde::de::Error>(self $(, $value: $type)?) -> Result<Self::Value, E> {
            ScalarVisitor.$visit($($value)?).map(Err)
        }
    )*};
}

struct MappingVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for MappingVisitor<T> {
    type Value = Result<Known<T>, Scalar>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        let mut others = Others::default();
        let fields = T::deserialize(Keys { map, others: &mut others })?;
        Ok(Ok(Known { fields, others }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        ScalarVisitor.visit_seq(list).map(Err)
    }

    else_a_scalar! {
        visit_unit(), visit_bool(flag: bool), visit_u64(n: u64), visit_i64(n: i64), visit_f64(n: f64),
        visit_str(text: &str),
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = Result<Vec<T>, Scalar>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(one) = list.next_element()? {
            all.push(one);
        }
        Ok(Ok(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        ScalarVisitor.visit_map(map).map(Err)
    }

    else_a_scalar! {
        visit_unit(), visit_bool(flag: bool), visit_u64(n: u64), visit_i64(n: i64), visit_f64(n: f64),
        visit_str(text: &str),
    }
}

/// The mapping as a struct sees it: its own fields alone.
struct Keys<'o, A> {
    map: A,
    others: &'o mut Others,
}

impl<'de, A: MapAccess<'de>> Deserializer<'de> for Keys<'_, A> {
    type Error = A::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        self.others.expected = fields;
        visitor.visit_map(&mut self)
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, A::Error> {
        MapAccessDeserializer::new(self.map).deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for &mut Keys<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        while let Some(key) = self.map.next_key::<String>()? {
            if self.others.expected.contains(&key.as_str()) {
                return seed.deserialize(key.into_deserializer()).map(Some);
            }
            let value: Spanned<IgnoredAny> = self.map.next_value()?;
            self.others.keys.push((key, value.referenced));
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}
