"""The judgement of every argument of Megatron's parser, by topic.

Arguments are named by their attributes. A name can have a range of Megatron releases, as in
`name>=0.20`. Arguments that a schedule rejects, translates or ignores are not listed here: their
judgement follows from `REFUSALS` and `TRANSLATIONS`. `judgements.py` joins both, and
`megatron-vshape doctor --verbose` prints them. A test compares the names with Megatron's parser.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Judgement(StrEnum):
    """The effect of an argument in a run with a schedule of this package."""

    SUPPORTED = "supported"
    NO_EFFECT = "no effect on a schedule"
    BY_MEGATRON = "rejected by Megatron"
    REJECTED = "rejected"
    TRANSLATED = "translated"
    IGNORED = "ignored"


class Topic(NamedTuple):
    """Arguments with one judgement and one reason."""

    judgement: Judgement
    title: str
    reason: str
    names: str  # separated by white space
    changes_step: bool = True  # whether memory or time of a training step depends on them


TOPICS = (
    Topic(
        Judgement.SUPPORTED,
        "parallel sizes",
        "a schedule changes only the pipeline dimension",
        """
        tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel
        context_parallel_size hierarchical_context_parallel_sizes cp_comm_type
        expert_model_parallel_size expert_tensor_parallel_size use_tp_pp_dp_mapping
        num_distributed_optimizer_instances
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "batch sizes and sequence length",
        "the schedule is planned for the number of microbatches of each step",
        """
        micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule
        decrease_batch_size_if_needed phase_transition_iterations seq_length encoder_seq_length
        decoder_seq_length iterations_to_skip
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "transformer layers",
        "the forward and backward passes run Megatron's layers with their numbers in the model",
        """
        num_layers encoder_num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels
        group_query_attention num_query_groups add_bias_linear add_qkv_bias normalization
        layernorm_epsilon layernorm_zero_centered_gamma apply_residual_connection_post_layernorm
        qk_layernorm qk_l2_norm attention_output_gate softmax_type window_size
        window_attn_skip_freq apply_query_key_layer_scaling attention_softmax_in_fp32
        swiglu squared_relu quick_geglu openai_gelu glu_linear_offset activation_func_clamp_value
        use_te_activation_func heterogeneous_layers_config_path
        heterogeneous_layers_config_encoded_json spec mlp_chunks_for_training
        enable_mhc_connections>=0.20 mhc_init_gating_factor>=0.20 mhc_num_residual_streams>=0.20
        mhc_sinkhorn_iterations>=0.20
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "position embeddings",
        "every stage computes them for its own layers",
        """
        position_embedding_type max_position_embeddings add_position_embedding
        use_rotary_position_embeddings rotary_base rotary_percent rotary_interleaved
        rotary_seq_len_interpolation_factor rotary_scaling_factor rope_type use_rope_scaling
        rope_scaling_factor no_rope_freq mrope_section relative_attention_num_buckets
        relative_attention_max_distance yarn_original_max_position_embeddings yarn_beta_fast
        yarn_beta_slow yarn_correction_range_round_to_int mscale mscale_all_dim
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "vocabulary and embeddings",
        "the first and the last stage have them, or all ranks with --pipeline-vocab-parallel",
        """
        vocab_size padded_vocab_size pad_vocab_size make_vocab_size_divisible_by vocab_extra_ids
        untie_embeddings_and_output_weights clone_scatter_output_in_embedding
        logit_dtype>=0.20
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "attention variants",
        "weight gradients of projections are computed in W, the rest of the backward in B",
        """
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
        mla_down_proj_fusion experimental_attention_variant linear_attention_freq
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
        dsa_indexer_k_norm_fp32
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "attention kernels",
        "a kernel runs within one pass",
        """
        attention_backend flash_attention_version use_flash_attn use_kitchen_attention
        kitchen_attention_backend
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "hybrid models",
        "layers are distributed to stages by the pattern of their types",
        """
        is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        use_mamba_mem_eff_path mamba_training_ssm_states_dtype gdp_num_householder>=0.20
        gdp_cutedsl_kernel>=0.20 gdp_num_chunk_states_to_recompute>=0.20
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "multi-token prediction",
        "the last stage has these layers, and the stages before it fewer others",
        """
        mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
        mtp_hsm>=0.20
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "experts",
        "the all-to-all of experts runs within one pass",
        """
        num_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size moe_grouped_gemm
        moe_use_grouped_tensor>=0.20 moe_single_grouped_weight moe_single_grouped_bias
        moe_mlp_glu_interleave_size use_fused_weighted_squared_relu moe_apply_probs_on_input
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
        moe_shared_expert_glu_interleave_size use_grouped_gemm_for_shared_expert
        use_grouped_gemm_for_dense_mlp moe_token_dispatcher_type moe_enable_deepep
        moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_permute_fusion moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_num_sms
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape<0.20 moe_ncclep_zero_copy
        moe_dispatch_fwd_dtype>=0.20 moe_combine_bwd_dtype>=0.20 high_priority_a2a_comm_stream
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
        moe_expert_rank_capacity_factor moe_paged_stash moe_paged_stash_page_size
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "routing and load balancing",
        "routers see full microbatches, and their counters are summed at the end of a step",
        """
        moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype
        moe_router_fusion moe_router_padding_for_quantization moe_router_padding_for_fp8
        moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
        moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_force_biased
        moe_input_jitter_eps moe_enable_routing_replay
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "initial weights and random numbers",
        "Megatron seeds every pipeline rank, as for its own schedules",
        """
        te_rng_tracker inference_rng_tracker data_parallel_random_init
        perform_initialization use_cpu_initialization init_model_with_meta_device init_method_std
        init_method_xavier_uniform embedding_init_method_std hidden_dropout attention_dropout
        use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
        mup_base_head_dim mup_attn_scale_power deterministic_mode batch_invariant_mode
        batch_invariant_backend>=0.20
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "random seed",
        "Megatron seeds every pipeline rank, as for its own schedules",
        "seed",
        changes_step=False,
    ),
    Topic(
        Judgement.SUPPORTED,
        "precision",
        "W accumulates into the gradient buffers in their precision",
        """
        fp16 bf16 fp32_residual_connection accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16
        disable_bf16_reduced_precision_matmul loss_scale
        initial_loss_scale min_loss_scale loss_scale_window hysteresis
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "FP8 and FP4",
        "every pass has the scaling factors of its microbatch",
        """
        fp8 fp8_recipe fp8_quantizer_factory fp8_margin fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_param_gather first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe
        fp4_quantizer_factory fp4_param_gather te_precision_config_file
        reuse_grad_buf_for_mxfp8_param_ag kitchen_config_file kitchen_recipe_number
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "fused kernels",
        "a kernel runs within one pass; fused layers that cannot be split compute W in B",
        """
        masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion
        apply_rope_fusion no_persist_layer_norm cross_entropy_loss_fusion cross_entropy_fusion_impl
        fused_residual_rmsnorm use_transformer_engine_op_fuser disable_jit_fuser
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "tensor-parallel communication",
        "it overlaps within one pass",
        """
        tp_comm_overlap tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_overlap_cfg tp_comm_bootstrap_backend tp_comm_split_ag
        tp_comm_split_rs symmetric_ar_type
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "recomputation",
        "B recomputes the layers that Megatron would recompute",
        """
        recompute_granularity recompute_method recompute_num_layers recompute_activations
        moe_layer_recompute distribute_saved_activations mhc_recompute_layer_num>=0.20
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "CUDA graphs",
        "those of Transformer Engine are captured in the order of the schedule",
        """
        external_cuda_graph cuda_graph_warmup_steps
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "loss",
        "the last stage computes it for every microbatch",
        """
        calculate_per_token_loss fp16_lm_cross_entropy logits_save_dir logits_save_top_k
        logits_save_top_p logits_save_top_p_min_k logits_save_dtype logits_load_dir
        logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
        logits_load_kd_loss_alpha logits_load_ignore_errors
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "optimizer",
        "it runs after all passes of a step; --optimizer-post-validation supports adam and sgd",
        """
        optimizer weight_decay apply_wd_to_qk_layernorm no_weight_decay_cond_type clip_grad
        adam_beta1 adam_beta2 adam_eps sgd_momentum lion_beta1 lion_beta2 muon_momentum
        muon_split_qkv muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type
        muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer
        muon_use_syrk>=0.20 muon_use_nesterov<0.18 use_layer_wise_param_layout
        use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype
        exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction
        use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads
        pin_cpu_params optimizer_cuda_graph dump_param_to_param_group_map freeze_all_layers
        qk_clip qk_clip_alpha qk_clip_threshold
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "length of training, learning rate and weight decay",
        "they change between steps",
        """
        train_iters train_samples
        lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_style
        lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters
        lr_warmup_samples lr_warmup_init decoupled_lr decoupled_min_lr start_weight_decay
        end_weight_decay weight_decay_incr_style override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.SUPPORTED,
        "gradient reduction and parameter gathering",
        "the reduction of a chunk starts after its last W, and its gather before its first F",
        """
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather align_grad_reduce
        align_param_gather ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw
        ddp_reduce_scatter_with_fp32_accumulation ddp_average_in_collective
        ddp_param_name_patterns_for_fp32_local_accumulation gradient_reduce_div_fusion nccl_ub
        disable_symmetric_registration
        check_for_nan_in_loss_and_grad check_for_large_grads
        check_weight_hash_across_dp_replicas_interval
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "process groups",
        "P2P messages use the group of the pipeline ranks",
        """
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init
        local_rank lazy_mpu_init nccl_communicator_config_path use_gloo_process_groups use_sharp
        sharp_enabled_group high_priority_stream_groups fake_process_group
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "checkpoints",
        "weights are saved by the number of their layer",
        """
        save save_interval save_retain_interval load load_main_params_from_ckpt
        non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo finetune
        pretrained_checkpoint ckpt_step use_checkpoint_args use_mp_args_from_checkpoint_args
        use_tokenizer_model_from_checkpoint_args exit_on_missing_checkpoint
        auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_save async_save
        async_strategy use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority
        async_ckpt_use_cpu_shm ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group
        ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity
        dist_ckpt_strictness dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable
        distrib_optim_fully_reshardable_mem_efficient replication replication_jump
        replication_factor verify_integrity stream_ckpt_dequant<0.20 no_save_optim no_save_rng
        no_load_optim no_load_rng override_ckpt_iteration dist_ckpt_workers
        ckpt_drop_redundant_extra_state>=0.20 ckpt_fully_parallel_load_per_rank_objects>=0.20
        ckpt_pg_tensors_cache_create>=0.20 ckpt_pg_tensors_cache_path>=0.20
        save_tokenizer_assets>=0.20 moe_use_upcycling moe_upcycling_granularity
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.SUPPORTED,
        "evaluation",
        "it runs the forward passes of the schedule",
        """
        eval_iters eval_interval start_eval_at_iter eval_global_batch_size eval_micro_batch_size
        skip_train test_mode full_validation multiple_validation_sets validation_set_names
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.SUPPORTED,
        "data loading of stages",
        "every chunk of a rank has its own iterator",
        """
        dataloader_type create_attention_mask_in_dataloader reset_position_ids
        reset_attention_mask eod_mask_loss dataloader_inter_document_masking sft
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "end, restart and repetition of training",
        "they act between the steps; --optimizer-post-validation undoes a started step",
        """
        exit_interval exit_duration_in_mins exit_signal_handler exit_signal
        exit_signal_handler_for_dataloader exit_signal_handler_for_training adlr_autoresume
        adlr_autoresume_interval rerun_mode error_injection_rate error_injection_type
        result_rejected_tracker_filename check_for_spiky_loss train_sync_interval
        empty_unused_memory_level manual_gc manual_gc_interval manual_gc_eval
        gpu_sniff_test_interval inprocess_restart inprocess_max_iterations
        inprocess_monitor_thread_interval inprocess_monitor_process_interval
        inprocess_progress_watchdog_interval inprocess_heartbeat_interval inprocess_soft_timeout
        inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time
        inprocess_granularity inprocess_active_world_size inprocess_empty_cuda_cache
        enable_ft_package calc_ft_timeouts ft_num_warmup_iters
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.SUPPORTED,
        "logs of tensors, gradients and routers",
        "hooks of modules run in the passes of the schedule; slices write one record per slice",
        """
        timing_log_level barrier_with_L1_time log_params_norm log_num_zeros_in_grad
        log_max_attention_logit moe_per_layer_logging save_params_interval
        save_activations_interval save_tokens_per_expert_interval save_wgrads_interval
        save_dgrads_interval moe_routing_trace_path moe_routing_trace_max_training_iters
        moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states
        moe_routing_trace_dump_weights log_straggler
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.SUPPORTED,
        "reinforcement learning with Megatron's trainer",
        "--perform-rl-step supports schedules with one chunk per rank",
        """
        rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin
        rl_sequence_packing_algo rl_offload_optimizer_during_inference rl_training_cuda_graphs
        rl_persist_cuda_graphs rl_partial_rollouts grpo_iterations
        """,
    ),
    Topic(
        Judgement.SUPPORTED,
        "configuration",
        "the options in a file are checked as flags are",
        """
        yaml_cfg enable_experimental
        """,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "P2P messages of Megatron's schedules",
        "a schedule of this package sends its own messages",
        """
        overlap_p2p_comm use_ring_exchange_p2p mtp_standalone
        scatter_gather_tensors_in_pipeline<0.18
        """,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "details of options that are translated or turned off",
        "Megatron reads them only with --fine-grained-activation-offloading or "
        "--defer-embedding-wgrad-compute",
        """
        offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction
        fine_grained_offloading_max_inflight_offloads wgrad_deferral_limit
        """,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "details of rejected options",
        "Megatron reads them only with FSDP, hybrid context parallelism or sharded weights (GTP)",
        """
        data_parallel_sharding_strategy outer_dp_sharding_strategy fsdp_double_buffer
        fsdp_manual_registration suggested_communication_unit_size keep_fp8_transpose_cache
        enable_full_sharding_in_hsdp torch_fsdp2_reshard_after_forward create_all_gather_group
        strict_fsdp_dtensor_load megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_grad_comm_dtype megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
        megatron_fsdp_version>=0.20 max_seqlen_per_dp_cp_rank
        gtp_remat_reduce_scatter_with_fp32_accumulation>=0.20 gtp_remat_nccl_ub>=0.20
        gtp_expert_remat_nccl_ub>=0.20 gtp_remat_opt_in_modules>=0.20
        """,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "data sets",
        "they define the content of microbatches",
        """
        data_path split train_data_path valid_data_path test_data_path data_args_path
        per_split_data_args_path per_dataset_sequences_path dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap data_cache_path mmap_bin_files mock_data num_workers
        num_dataset_builder_threads object_storage_cache_path mid_level_dataset_surplus
        allow_ambiguous_pad_tokens sample_rate fim_data fim_rate fim_spm_rate fim_split_sample
        fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token
        fim_pad_token fim_eod_token sft_tokenizer_prompt_format enable_msc disable_msc_deprecated
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "tokenizers",
        "they define the content of microbatches",
        """
        vocab_file merge_file tokenizer_type tokenizer_model metadata_path special_tokens
        tiktoken_pattern tiktoken_num_special_tokens tiktoken_special_tokens<0.18
        tokenizer_sentencepiece_legacy tokenizer_sentencepiece_ignore_extra_whitespaces
        tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens
        tokenizer_hf_use_fast<0.18 tokenizer_hf_include_special_tokens<0.18
        tokenizer_metadata<0.18 tokenizer_special_tokens<0.18 trust_remote_code
        null_tokenizer_eod_id null_tokenizer_pad_id chat_template use_gigatoken>=0.20
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "log files and services",
        "they report numbers that Megatron has after a step",
        """
        log_interval log_throughput log_progress timing_log_option tensorboard_dir
        tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard
        log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard
        log_memory_interval log_device_memory_used log_world_size_to_tensorboard wandb_project
        wandb_exp_name wandb_save_dir wandb_entity logging_level log_energy config_logger_dir
        enable_one_logger one_logger_project one_logger_run_name one_logger_async
        app_tag_run_name app_tag_run_version straggler_ctrlr_port straggler_minmax_count
        disable_straggler_on_startup run_workload_inspector_server otel_enabled>=0.20
        otel_service_name>=0.20 otel_span_groups>=0.20
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "profilers",
        "they observe a run",
        """
        profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra record_memory_history memory_snapshot_path record_shapes
        nvtx_ranges flight_recorder_dump_path flight_recorder_trace_buffer_size
        flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "injected faults",
        "they end or stop a rank at any moment, as real faults do",
        """
        fault_injector_ranks fault_injector_num_ranks fault_injector_fault_types
        fault_injector_fault_probabilities fault_injector_fault_delay
        fault_injector_delay_start_iteration fault_injector_mtti_seconds
        fault_injector_offset_seconds fault_injector_seed
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "generation in reinforcement learning",
        "it runs between training steps",
        """
        rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag
        rl_submission_granularity rl_consumption_granularity grpo_clamp_eps_lower
        grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight
        grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature
        rl_default_top_p rl_default_top_k rl_kv_cache_management_mode
        rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
        rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle
        refit_method rl_verify_model_weights_swap rl_skip_bos_token rl_profile rl_profile_dir
        rl_inference_parsers rl_durable_rollout_bank>=0.20 rl_max_inflight_requests>=0.20
        rl_rollout_bank_dir>=0.20 rl_rollout_bank_max_bytes>=0.20 rl_generation_batch_size<0.19
        rl_num_parallel_generation_batches<0.19 rl_num_parallel_generations<0.19
        rl_parallel_generation_tasks<0.19
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "inference",
        "training does not read them",
        """
        inference_batch_times_seqlen_threshold max_tokens_to_oom use_legacy_static_engine
        inference_max_requests inference_max_seq_length inference_dynamic_batching
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events
        inference_dynamic_batching_cuda_graph_max_tokens<0.18 decode_only_cuda_graphs
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_dynamic_batching_unified_memory_level enable_chunked_prefill
        num_speculative_tokens inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode
        inference_logging_step_interval inference_text_gen_server_logging inference_wandb_logging
        inference_coordinator_port mamba_inference_conv_states_dtype
        mamba_inference_ssm_states_dtype inference_use_synchronous_zmq_collectives
        inference_disable_ep_consensus inference_shards inference_cuda_graph_scope flash_decode
        nccl_all_reduce_for_prefill inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference cache_mla_latents
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "other model families",
        "GPT and hybrid models do not read them",
        """
        decoder_num_layers mask_prob short_seq_prob bert_binary_head bert_embedder_type bert_load
        output_bert_embeddings ict_head_size ict_load biencoder_projection_dim
        biencoder_shared_query_context_model titles_data_path query_in_block_prob
        use_one_sent_docs evidence_data_path retriever_report_topk_accuracies
        retriever_score_scaling block_data_path embedding_path indexer_batch_size
        indexer_log_interval num_classes img_h img_w num_channels patch_dim classes_fraction
        data_per_class_fraction data_sharding head_lr_mult vision_pretraining
        vision_pretraining_type vision_backbone_type swin_backbone_type mask_type mask_factor
        iter_per_epoch dino_local_img_size dino_local_crops_number dino_head_hidden_size
        dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer
        dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.NO_EFFECT,
        "deprecated options",
        "Megatron ignores them or uses them to read old checkpoints",
        """
        onnx_safe fp8_interval use_legacy_models<0.18 deprecated_use_mcore_models
        use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_fully_parallel_save_deprecated
        mtp_hybrid_override_pattern
        """,
        changes_step=False,
    ),
    Topic(
        Judgement.BY_MEGATRON,
        "removed options",
        "Megatron ends the run and names the new option",
        """
        batch_size warmup model_parallel_size checkpoint_activations
        """,
    ),
    Topic(
        Judgement.BY_MEGATRON,
        "options for one pipeline rank",
        "Megatron's config rejects CPU offloading with pipeline parallelism",
        """
        cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers
        """,
    ),
)
"""All arguments that neither `REFUSALS` nor `TRANSLATIONS` judge."""
