// SPDX-License-Identifier: Apache-2.0
//! FLUX.2 [dev] as published, without its numbers: files that have the names, shapes, types, order, shards and lengths of the
//! real ones and are holes from end to end.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use flux2::{
    device::{Precision, record::RecordDevice},
    error::Result,
    model::{Configs, Model, Weights},
    spec::DEV,
    weight::{DType, Storage, Weight},
};
use serde_json::{Map, Value, json};

/// Bytes of each published file and what it is, in order: 7 of the transformer, 10 of the text encoder, the VAE.
pub const PUBLISHED: [u64; 18] = [
    9_935_797_200,
    9_890_181_048,
    9_814_681_480,
    9_814_681_536,
    9_814_681_536,
    9_814_681_536,
    5_361_898_792,
    4_883_550_696,
    4_781_593_336,
    4_886_472_224,
    4_781_593_376,
    4_781_593_368,
    4_886_472_248,
    4_781_593_376,
    4_781_593_368,
    4_886_472_248,
    4_571_866_320,
    336_213_556,
];

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        let element = match self.dtype {
            "I64" => 8,
            "F32" => 4,
            _ => 2,
        };
        self.shape.iter().product::<usize>() as u64 * element
    }
}

/// Collects tensors in the order of the published model's state dict.
#[derive(Default)]
pub struct List(pub Vec<Tensor>);

impl List {
    fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        let name = format!("{}.weight", name.into());
        self.0.push(Tensor { name, dtype: "BF16", shape: shape.to_vec() });
    }
}

/// The transformer: `heads` heads of 128.
pub fn transformer(heads: usize, double: usize, single: usize, context: usize) -> Vec<Tensor> {
    let n = heads * 128;
    let mut list = List::default();
    for embedder in ["timestep", "guidance"] {
        list.add(format!("time_guidance_embed.{embedder}_embedder.linear_1"), &[n, 256]);
        list.add(format!("time_guidance_embed.{embedder}_embedder.linear_2"), &[n, n]);
    }
    list.add("double_stream_modulation_img.linear", &[6 * n, n]);
    list.add("double_stream_modulation_txt.linear", &[6 * n, n]);
    list.add("single_stream_modulation.linear", &[3 * n, n]);
    list.add("x_embedder", &[n, 128]);
    list.add("context_embedder", &[n, context]);
    for block in (0..double).map(|index| format!("transformer_blocks.{index}")) {
        let mut attention = |names: &[&str], shape: &[usize]| {
            for name in names {
                list.add(format!("{block}.attn.{name}"), shape);
            }
        };
        attention(&["to_q", "to_k", "to_v"], &[n, n]);
        attention(&["norm_q", "norm_k"], &[128]);
        attention(&["to_out.0"], &[n, n]);
        attention(&["norm_added_q", "norm_added_k"], &[128]);
        attention(&["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"], &[n, n]);
        for stream in ["ff", "ff_context"] {
            list.add(format!("{block}.{stream}.linear_in"), &[6 * n, n]);
            list.add(format!("{block}.{stream}.linear_out"), &[n, 3 * n]);
        }
    }
    for block in (0..single).map(|index| format!("single_transformer_blocks.{index}.attn")) {
        list.add(format!("{block}.to_qkv_mlp_proj"), &[9 * n, n]);
        list.add(format!("{block}.norm_q"), &[128]);
        list.add(format!("{block}.norm_k"), &[128]);
        list.add(format!("{block}.to_out"), &[n, 4 * n]);
    }
    list.add("norm_out.linear", &[2 * n, n]);
    list.add("proj_out", &[128, n]);
    list.0
}

/// Mistral3ForConditionalGeneration with its vision tower, projector and head, by the names of transformers 4.
pub fn text_encoder() -> Vec<Tensor> {
    let mut list = List::default();
    let (width, hidden) = (1024, 5120);
    list.add("vision_tower.patch_conv", &[width, 3, 14, 14]);
    list.add("vision_tower.ln_pre", &[width]);
    for layer in (0..24).map(|index| format!("vision_tower.transformer.layers.{index}")) {
        list.add(format!("{layer}.attention_norm"), &[width]);
        list.add(format!("{layer}.feed_forward.gate_proj"), &[4 * width, width]);
        list.add(format!("{layer}.feed_forward.up_proj"), &[4 * width, width]);
        list.add(format!("{layer}.feed_forward.down_proj"), &[width, 4 * width]);
        for name in ["k_proj", "v_proj", "q_proj", "o_proj"] {
            list.add(format!("{layer}.attention.{name}"), &[width, width]);
        }
        list.add(format!("{layer}.ffn_norm"), &[width]);
    }
    list.add("multi_modal_projector.norm", &[width]);
    list.add("multi_modal_projector.patch_merger.merging_layer", &[width, 4 * width]);
    list.add("multi_modal_projector.linear_1", &[hidden, width]);
    list.add("multi_modal_projector.linear_2", &[hidden, hidden]);
    let model = "language_model.model";
    list.add(format!("{model}.embed_tokens"), &[131_072, hidden]);
    for layer in (0..40).map(|index| format!("{model}.layers.{index}")) {
        list.add(format!("{layer}.self_attn.q_proj"), &[4096, hidden]);
        list.add(format!("{layer}.self_attn.k_proj"), &[1024, hidden]);
        list.add(format!("{layer}.self_attn.v_proj"), &[1024, hidden]);
        list.add(format!("{layer}.self_attn.o_proj"), &[hidden, 4096]);
        list.add(format!("{layer}.mlp.gate_proj"), &[32_768, hidden]);
        list.add(format!("{layer}.mlp.up_proj"), &[32_768, hidden]);
        list.add(format!("{layer}.mlp.down_proj"), &[hidden, 32_768]);
        list.add(format!("{layer}.input_layernorm"), &[hidden]);
        list.add(format!("{layer}.post_attention_layernorm"), &[hidden]);
    }
    list.add(format!("{model}.norm"), &[hidden]);
    list.add("language_model.lm_head", &[131_072, hidden]);
    list.0
}

/// Writes down what a model asks for.
#[derive(Default)]
struct Asked(std::cell::RefCell<Vec<(String, Vec<usize>)>>);

impl Weights for Asked {
    fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        self.0.borrow_mut().push((name.into(), shape.to_vec()));
        Ok(Weight::new(name, Storage::Absent, 0, DType::Bf16, shape))
    }
    fn ignore(&self, _: &dyn Fn(&str) -> bool) {}
}

/// The VAE in F32, with the counter of its batch norm. Its names are those that the model asks for; the length of the file
/// shows that they are the published ones.
pub fn vae() -> Vec<Tensor> {
    let asked = [Asked::default(), Asked::default(), Asked::default()];
    let weights = asked.each_ref().map(|asked| asked as &dyn Weights);
    Model::load(&RecordDevice::new(Precision::F32), weights, &Configs::dev(), &DEV).expect("the shapes");
    let [_, _, vae] = asked;
    let tensors = vae.0.into_inner().into_iter();
    let mut tensors: Vec<_> = tensors.map(|(name, shape)| Tensor { name, dtype: "F32", shape }).collect();
    tensors.push(Tensor { name: "bn.num_batches_tracked".into(), dtype: "I64", shape: Vec::new() });
    tensors
}

/// Cuts a state dict into shards as huggingface_hub does: a new one where the next tensor would go over `limit` bytes.
pub fn shards(tensors: &[Tensor], limit: u64) -> Vec<Vec<Tensor>> {
    let mut shards: Vec<Vec<Tensor>> = vec![Vec::new()];
    let mut size = 0;
    for tensor in tensors {
        let last = shards.len() - 1;
        if size + tensor.bytes() > limit && !shards[last].is_empty() {
            shards.push(Vec::new());
            size = 0;
        }
        size += tensor.bytes();
        let last = shards.len() - 1;
        shards[last].push(tensor.clone());
    }
    shards
}

/// Writes a safetensors file: its header, and the data as a hole, or as `pool` over and over. Returns the length.
pub fn write(path: &Path, tensors: &[Tensor], pool: Option<&[u8]>) -> u64 {
    let mut tensors = tensors.to_vec();
    // As the library orders them: wide types first, then by name.
    let wide = |tensor: &Tensor| ["I64", "F32", "BF16"].iter().position(|dtype| *dtype == tensor.dtype);
    tensors.sort_by(|a, b| (wide(a), &a.name).cmp(&(wide(b), &b.name)));
    let mut header = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut end = 0;
    for tensor in &tensors {
        let start = end;
        end += tensor.bytes();
        let shape: Vec<String> = tensor.shape.iter().map(ToString::to_string).collect();
        let _ = write!(
            header,
            ",\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{start},{end}]}}",
            tensor.name,
            tensor.dtype,
            shape.join(",")
        );
    }
    header.push('}');
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = fs::File::create(path).expect("a file");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("a header");
    file.write_all(header.as_bytes()).expect("a header");
    let mut rest = end;
    while let Some(pool) = pool.filter(|_| rest > 0) {
        let part = pool.len().min(rest as usize);
        file.write_all(&pool[..part]).expect("data");
        rest -= part as u64;
    }
    let length = 8 + header.len() as u64 + end;
    file.set_len(length).expect("a length");
    length
}

/// Writes shards with their index, or one file; returns their lengths.
pub fn write_component(directory: &Path, stem: &str, tensors: &[Tensor], limit: u64) -> Vec<u64> {
    let shards = shards(tensors, limit);
    if let [only] = shards.as_slice() {
        return vec![write(&directory.join(format!("{stem}.safetensors")), only, None)];
    }
    let count = shards.len();
    let mut map = Map::new();
    let mut lengths = Vec::new();
    for (index, shard) in shards.iter().enumerate() {
        let name = format!("{stem}-{:05}-of-{count:05}.safetensors", index + 1);
        lengths.push(write(&directory.join(&name), shard, None));
        map.extend(shard.iter().map(|tensor| (tensor.name.clone(), json!(name))));
    }
    let total: u64 = tensors.iter().map(Tensor::bytes).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    let path = directory.join(format!("{stem}.safetensors.index.json"));
    fs::write(path, index.to_string()).expect("an index");
    lengths
}

/// The tiny dev checkpoint, whose small files are taken.
fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dev/tiny")
}

/// A configuration of the tiny checkpoint with other values.
pub fn configure(directory: &Path, part: &str, change: impl FnOnce(&mut Value)) {
    let text = fs::read_to_string(tiny().join(part).join("config.json")).expect("a configuration");
    let mut config = serde_json::from_str(&text).expect("JSON");
    change(&mut config);
    fs::create_dir_all(directory.join(part)).expect("a directory");
    fs::write(directory.join(part).join("config.json"), config.to_string()).expect("a configuration");
}

/// Sets fields of an object.
pub fn set(object: &mut Value, fields: &Value) {
    let (Some(object), Some(fields)) = (object.as_object_mut(), fields.as_object()) else {
        panic!("objects")
    };
    object.extend(fields.clone());
}

/// Takes parts of the tiny checkpoint as they are.
pub fn link(directory: &Path, parts: &[&str]) {
    for part in parts {
        symlink(tiny().join(part), directory.join(part)).expect("a link");
    }
}

/// The whole published checkpoint but its tokenizer, which is the tiny one's. Returns the lengths of the weight files.
pub fn dev(directory: &Path) -> Vec<u64> {
    link(directory, &["model_index.json", "scheduler", "tokenizer"]);
    configure(directory, "transformer", |config| {
        set(
            config,
            &json!({"attention_head_dim": 128, "axes_dims_rope": [32, 32, 32, 32],
            "joint_attention_dim": 15_360, "num_attention_heads": 48, "num_layers": 8, "num_single_layers": 48}),
        );
    });
    configure(directory, "text_encoder", |config| {
        set(
            &mut config["text_config"],
            &json!({"head_dim": 128, "hidden_size": 5120, "intermediate_size": 32_768,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "vocab_size": 131_072}),
        );
    });
    configure(directory, "vae", |config| {
        set(config, &json!({"block_out_channels": [128, 256, 512, 512], "norm_num_groups": 32}));
    });
    let part = |name: &str, stem: &str, tensors: &[Tensor], limit| {
        write_component(&directory.join(name), stem, tensors, limit)
    };
    let mut lengths =
        part("transformer", "diffusion_pytorch_model", &transformer(48, 8, 48, 15_360), 10_000_000_000);
    lengths.extend(part("text_encoder", "model", &text_encoder(), 5_000_000_000));
    lengths.extend(part("vae", "diffusion_pytorch_model", &vae(), u64::MAX));
    lengths
}
