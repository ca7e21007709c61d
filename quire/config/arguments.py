"""What becomes of each argument of vLLM's `LLM`: supported, accepted with a warning, or refused.

Supported arguments are the options themselves (options.py). The others are listed here, so that a
script written for vLLM either runs with the same results or stops with a reason.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.protocol.errors import OptionError


@dataclass(frozen=True)
class Refusal:
    """An argument that would change results if it were ignored."""

    reason: str
    neutral: tuple[Any, ...]
    """Values that ask for nothing, and so are accepted in silence."""


SWITCHES: set[str] = set()
"""Arguments without effect that are True or False, and so flags without a value."""


def _ignored(groups: Mapping[str, str]) -> dict[str, str]:
    reasons = {}
    for reason, names in groups.items():
        for name in names.split():
            if name.endswith("?"):
                SWITCHES.add(name[:-1])
            reasons[name.removesuffix("?")] = reason
    return reasons


def _refused(groups: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> dict[str, Refusal]:
    return {
        name: Refusal(reason, (None, *neutral))
        for reason, names in groups.items()
        for name, neutral in names.items()
    }


# Why it is harmless -> the arguments, which are accepted with one warning each. Those that end in ?
# are switches: flags without a value.
IGNORED: dict[str, str] = _ignored(
    {
        "preempted requests are recomputed, never swapped": "swap_space preemption_mode",
        "there is one block manager and one scheduler loop": """
            use_v2_block_manager? num_scheduler_steps multi_step_stream_outputs? async_scheduling?
            disable_async_output_proc? num_lookahead_slots scheduler_delay_factor watermark
            scheduler_reserve_full_isl? prefill_schedule_interval max_num_partial_prefills
            max_long_partial_prefills max_num_scheduled_tokens stream_interval
            disable_hybrid_kv_cache_manager? kv_sharing_fast_prefill?
            prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit""",
        "there is nothing to compile or to tune at start-up": """
            compilation_config max_seq_len_to_capture max_context_len_to_capture cuda_graph_sizes
            cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode
            kernel_config ir_op_priority linear_backend enable_flashinfer_autotune?
            attention_config additional_config jit_monitor_mode jit_monitor_verbose?""",
        "the engine runs in one process on one device": """
            disable_custom_all_reduce? distributed_executor_backend max_parallel_loading_workers
            ray_workers_use_nsight? worker_use_ray? engine_use_ray? worker_cls worker_extension_cls
            master_addr master_port node_rank distributed_timeout_seconds dp_sync_interval
            cpu_distributed_timeout_seconds numa_bind? numa_bind_nodes numa_bind_cpus
            dcp_comm_backend dcp_q_replicate? dcp_kv_cache_interleave_size
            cp_kv_cache_interleave_size data_parallel_address data_parallel_rpc_port
            data_parallel_backend disable_nccl_for_dp_synchronization? all2all_backend enable_dbo?
            ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
            enable_batch_sharded_sampling? enable_fault_tolerance? fault_tolerance_config
            enable_nccl_comm_suspend? shutdown_timeout""",
        "no supported model has experts": """
            enable_expert_parallel? enable_ep_weight_filter? enable_elastic_ep? enable_eplb?
            eplb_config expert_placement_strategy moe_backend enable_bf16x3_router_gemm?""",
        "no supported model has state-space layers": """
            mamba_config mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
            mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm
            enable_mamba_cache_stochastic_rounding? use_replayssm? replayssm_buffer_len
            gdn_prefill_backend kda_prefill_backend""",
        "supported models read text only": """
            limit_mm_per_prompt allowed_local_media_path allowed_media_domains media_io_kwargs
            enable_mm_embeds? interleave_mm_strings? language_model_only? skip_mm_profiling?
            disable_mm_preprocessor_cache? disable_chunked_mm_input? mm_processor_cache_gb
            mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
            mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_tensor_ipc
            mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin mm_processor_device mm_ipc_gpu_memory_gb
            mm_device_do_normalize? video_pruning_rate video_pruning_method
            enable_mm_processor_stats? ec_manager_config""",
        "adapters are not there yet, so there is nothing to size": """
            max_loras max_lora_rank max_cpu_loras fully_sharded_loras? lora_dtype
            lora_extra_vocab_size long_lora_scaling_factors lora_target_modules default_mm_loras
            enable_lora_bias? enable_tower_connector_lora? specialize_active_lora?
            enable_mixed_moe_lora_format? enable_moe_shared_loras? max_prompt_adapters
            max_prompt_adapter_token""",
        "there is one way to structured output, set by structured_outputs_config": """
            guided_decoding_backend guided_decoding_disable_fallback?
            guided_decoding_disable_any_whitespace?
            guided_decoding_disable_additional_properties?""",
        "it is an option of `quire serve`": """
            served_model_name reasoning_parser enable_log_requests? max_log_len
            otlp_traces_endpoint api_server_count tool_call_parser""",
        "requests are logged only where --enable-log-requests asks for it": "disable_log_requests?",
        "tool calls and reasoning are told from the text wherever a chat has them": """
            enable_auto_tool_choice? enable_reasoning? reasoning_config""",
        "there are no plug-ins": "reasoning_parser_plugin io_processor_plugin tool_parser_plugin",
        "each process logs for itself, and tokenises on its own": """
            aggregate_engine_logging? renderer_num_workers disable_frontend_multiprocessing?""",
        "it is not measured here": """
            profiler_config collect_detailed_traces kv_cache_metrics?
            kv_cache_metrics_sample cudagraph_metrics? enable_layerwise_nvtx_tracing?
            enable_mfu_metrics? enable_logging_iteration_details? show_hidden_metrics_for_version
            per_request_spec_decode_metrics?""",
        "tokenising needs no pool": """
            tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config""",
        "weights are always streamed from memory-mapped files": """
            safetensors_load_strategy safetensors_prefetch_num_threads use_tqdm_on_load?
            safetensors_prefetch_block_size model_loader_extra_config ignore_patterns
            pt_load_map_location""",
        "code that comes with a model is never run": "trust_remote_code? code_revision model_impl",
        "there is no sleep mode yet": "enable_sleep_mode? enable_cumem_allocator?",
        "it has no counterpart here": """
            calculate_kv_scales? kv_cache_dtype_skip_layers allow_deprecated_quantization?
            override_neuron_config override_attention_dtype use_fp64_gumbel? weight_transfer_config
            fail_on_environ_validation? disable_logprobs_during_spec_decoding?""",
    }
)

# Why it cannot be ignored -> the arguments with the values (other than None) that ask for nothing.
REFUSED: dict[str, Refusal] = _refused(
    {
        "adapters are not supported yet": {
            "enable_lora": (False,),
            "lora_modules": (),
            "enable_prompt_adapter": (False,),
            "qlora_adapter_name_or_path": (),
        },
        "speculative decoding is not supported yet": {
            "speculative_config": (),
            "spec_method": (),
            "spec_model": (),
            "spec_tokens": (),
            "speculative_model": (),
            "speculative_model_quantization": (),
            "speculative_draft_tensor_parallel_size": (),
            "speculative_disable_mqa_scorer": (False,),
            "speculative_max_model_len": (),
            "speculative_disable_by_batch_size": (),
            "num_speculative_tokens": (),
            "ngram_prompt_lookup_max": (),
            "ngram_prompt_lookup_min": (),
            "spec_decoding_acceptance_method": ("rejection_sampler",),
            "typical_acceptance_sampler_posterior_threshold": (),
            "typical_acceptance_sampler_posterior_alpha": (),
        },
        "weights and cache stay on the device; offloading is not supported yet": {
            "cpu_offload_gb": (0,),
            "cpu_offload_params": (set(), [], ()),
            "offload_backend": ("auto",),
            "offload_group_size": (0,),
            "offload_num_in_group": (1,),
            "offload_prefetch_step": (1,),
            "offload_params": (set(), [], ()),
            "kv_offloading_size": (0,),
            "kv_offloading_backend": ("native",),
        },
        "the model runs on one device; set it to 1 or leave it out": {
            "pipeline_parallel_size": (1,),
            "data_parallel_size": (1,),
            "data_parallel_size_local": (1,),
            "data_parallel_rank": (0,),
            "data_parallel_start_rank": (0,),
            "data_parallel_hybrid_lb": (False,),
            "data_parallel_external_lb": (False,),
            "data_parallel_multi_port_external_lb": (False,),
            "decode_context_parallel_size": (1,),
            "prefill_context_parallel_size": (1,),
            "nnodes": (1,),
            "device_ids": (),
        },
        "the cache is not shared between engines": {
            "kv_transfer_config": (),
            "kv_events_config": (),
            "ec_transfer_config": (),
        },
        "Quire generates text and nothing else": {
            "task": ("auto", "generate"),
            "runner": ("auto", "generate"),
            "convert": ("auto", "none"),
            "pooler_config": (),
            "override_pooler_config": (),
            "mm_encoder_only": (False,),
            "diffusion_config": (),
        },
        "supported models read text only": {
            "mm_processor_kwargs": ({},),
            "enable_prompt_embeds": (False,),
        },
        "custom code in the engine is not supported": {
            "logits_processors": ([], ()),
            "logits_processor_pattern": (),
            "scheduler_cls": (),
            "model_class_overrides": ({},),
        },
        "quantisation schemes are not supported yet": {
            "quantization_config": (),
            "quantization_param_path": (),
        },
        "change config.json's values with hf_overrides instead": {
            "rope_scaling": (),
            "rope_theta": (),
            "hf_config_path": (),
            "config_format": ("auto", "hf"),
            "disable_sliding_window": (False,),
        },
        "pass these values in SamplingParams instead": {"override_generation_config": ({},)},
        "outputs do not carry this": {
            "enable_return_routed_experts": (False,),
            "return_sampling_mask": (False,),
            "enable_trace_replay": (False,),
        },
        "use skip_tokenizer_init instead": {"tokens_only": (False,)},
    }
)


def accepted_arguments(
    arguments: Mapping[str, Any], supported: Collection[str], stacklevel: int
) -> dict[str, Any]:
    """The supported ones among `arguments`; warns of those ignored, raises for all others."""
    accepted = {}
    for name, value in arguments.items():
        if name in supported:
            accepted[name] = value
        elif name in IGNORED:
            if value is not None and value is not False:
                message = f"{name}={value!r} has no effect: {IGNORED[name]}."
                warnings.warn(message, stacklevel=stacklevel)
        elif name in REFUSED:
            refuse_unless_neutral(name, value)
        else:
            raise OptionError(
                f"{name} is not an option (got {value!r}). " + nearest(name, supported)
            )
    return accepted


SWITCHES.update(
    name for name, refusal in REFUSED.items() if any(v is False for v in refusal.neutral)
)


def refuse_unless_neutral(name: str, value: Any) -> None:
    refusal = REFUSED[name]
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict, set))
    if not plain or value not in refusal.neutral:
        raise OptionError(f"{name}={value!r} is refused: {refusal.reason}. Leave {name} unset.")


def nearest(name: str, supported: Collection[str]) -> str:
    """A sentence that names the supported option most like `name`."""
    close = difflib.get_close_matches(name, supported, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    return "`quire generate --help` lists all options."
