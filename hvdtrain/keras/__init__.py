"""The names of `horovod.keras`, with the same meaning, on Keras 3.

    import hvdtrain.keras as hvd

docs/horovod-names.md says of each name whether it is the same, better, or not possible.
"""

from hvdtrain.keras import callbacks as callbacks
from hvdtrain.keras import elastic as elastic
from hvdtrain.tensorflow.basics import Adasum as Adasum
from hvdtrain.tensorflow.basics import Average as Average
from hvdtrain.tensorflow.basics import Max as Max
from hvdtrain.tensorflow.basics import Min as Min
from hvdtrain.tensorflow.basics import Product as Product
from hvdtrain.tensorflow.basics import Sum as Sum
from hvdtrain.tensorflow.basics import ccl_built as ccl_built
from hvdtrain.tensorflow.basics import check_num_rank_power_of_2 as check_num_rank_power_of_2
from hvdtrain.tensorflow.basics import cross_rank as cross_rank
from hvdtrain.tensorflow.basics import cross_size as cross_size
from hvdtrain.tensorflow.basics import cuda_built as cuda_built
from hvdtrain.tensorflow.basics import ddl_built as ddl_built
from hvdtrain.tensorflow.basics import gloo_built as gloo_built
from hvdtrain.tensorflow.basics import gloo_enabled as gloo_enabled
from hvdtrain.tensorflow.basics import gpu_available as gpu_available
from hvdtrain.tensorflow.basics import init as init
from hvdtrain.tensorflow.basics import is_homogeneous as is_homogeneous
from hvdtrain.tensorflow.basics import is_initialized as is_initialized
from hvdtrain.tensorflow.basics import local_rank as local_rank
from hvdtrain.tensorflow.basics import local_size as local_size
from hvdtrain.tensorflow.basics import mpi_built as mpi_built
from hvdtrain.tensorflow.basics import mpi_enabled as mpi_enabled
from hvdtrain.tensorflow.basics import mpi_threads_supported as mpi_threads_supported
from hvdtrain.tensorflow.basics import nccl_built as nccl_built
from hvdtrain.tensorflow.basics import rocm_built as rocm_built
from hvdtrain.tensorflow.basics import shutdown as shutdown
from hvdtrain.tensorflow.basics import start_timeline as start_timeline
from hvdtrain.tensorflow.basics import stop_timeline as stop_timeline
from hvdtrain.tensorflow.compression import Compression as Compression
from hvdtrain.tensorflow.current import rank as rank
from hvdtrain.tensorflow.current import size as size
from hvdtrain.tensorflow.functions import allgather_object as allgather_object
from hvdtrain.tensorflow.functions import broadcast_global_variables as broadcast_global_variables
from hvdtrain.tensorflow.functions import broadcast_object as broadcast_object
from hvdtrain.tensorflow.functions import broadcast_variables as broadcast_variables
from hvdtrain.tensorflow.keras.models import DistributedOptimizer as DistributedOptimizer
from hvdtrain.tensorflow.keras.models import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from hvdtrain.tensorflow.keras.models import allgather as allgather
from hvdtrain.tensorflow.keras.models import allreduce as allreduce
from hvdtrain.tensorflow.keras.models import broadcast as broadcast
from hvdtrain.tensorflow.keras.models import load_model as load_model
from hvdtrain.tensorflow.keras.models import reducescatter as reducescatter
from hvdtrain.tensorflow.mpi_ops import barrier as barrier
from hvdtrain.tensorflow.mpi_ops import join as join
from hvdtrain.tensorflow.process_sets import ProcessSet as ProcessSet
from hvdtrain.tensorflow.process_sets import add_process_set as add_process_set
from hvdtrain.tensorflow.process_sets import global_process_set as global_process_set
from hvdtrain.tensorflow.process_sets import remove_process_set as remove_process_set
from hvdtrain.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
